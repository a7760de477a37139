"""Names of container images, and the variables by which a service file gives the login of their registry. Pure."""

from __future__ import annotations

from collections.abc import Mapping

USERNAME, PASSWORD, SERVER = "SKYPILOT_DOCKER_USERNAME", "SKYPILOT_DOCKER_PASSWORD", "SKYPILOT_DOCKER_SERVER"


def full_name(image: str, variables: Mapping[str, str]) -> str:
    """Return the image's name with the registry of `SKYPILOT_DOCKER_SERVER` before it, if there is one and the name lacks it."""
    server = variables.get(SERVER, "").strip().rstrip("/")
    return f"{server}/{image}" if server and not image.startswith(f"{server}/") else image


def registry_of(image: str) -> str:
    """Return the host of an image's registry; "" is docker's own."""
    host, slash, _ = image.partition("/")
    return host if slash and ("." in host or ":" in host or host == "localhost") else ""
