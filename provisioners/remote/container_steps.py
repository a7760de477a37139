"""The steps by which a machine gets the container image that a replica runs in: docker, a login, the image.

A machine that is rented for the replica gets docker where its image has none; a host of the user's own is left as it is. A private
registry of a cloud is logged in to by the machine's own identity, any other by the service's secrets. What a login leaves behind is
removed after the pull.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from provisioners.port.docker_image import PASSWORD, USERNAME, registry_of
from provisioners.remote.machine_tools import apt_install, aws_program, needs
from provisioners.remote.step import TRANSFER_S, Content, Step

_INSTALL_S = 900.0
_GPU_TOOLS = (  # any of which lets docker give GPUs to a container
    "nvidia-ctk",
    "nvidia-container-runtime",
    "nvidia-container-runtime-hook",
    "nvidia-container-toolkit",
)
_ECR = re.compile(r"(\d{12})\.dkr\.ecr(?:-fips)?\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?")
_GOOGLE = re.compile(r"(?:[a-z0-9-]+\.)?gcr\.io|[a-z0-9-]+-docker\.pkg\.dev")
_AZURE = re.compile(r"[a-z0-9]{5,50}\.azurecr\.(?:io|us|cn)")


def steps(image: str, variables: Mapping[str, str], *, gpus: int, may_install: bool) -> Iterator[Step]:
    """Yield the steps that start a container.

    `image` is the full name, `variables` the service's environment and secrets, `gpus` how many of NVIDIA's the container is to
    have.
    """
    if may_install:
        yield Step("docker", "looking for docker", _docker(gpus), _INSTALL_S)
    yield _pull(image, variables, may_install=may_install)


def _docker(gpus: int) -> str:
    """Installed by apt where it is missing. The connection keeps the groups that it had, so the socket is given to ours."""
    lines = [
        "if ! command -v docker >/dev/null; then",
        apt_install("docker.io", "docker, which this machine's image does not have"),
        'sudo -n usermod -aG docker "$(id -un)"',
        "i=0; while [ ! -S /var/run/docker.sock ] && [ $i -lt 30 ]; do i=$((i+1)); sleep 1; done",
        'sudo -n chgrp "$(id -gn)" /var/run/docker.sock',
        "fi",
    ]
    if gpus:
        lines += [
            f"if ! {{ {' || '.join(f'command -v {one}' for one in _GPU_TOOLS)}; }} >/dev/null; then",
            apt_install(
                "nvidia-container-toolkit", "GPUs in containers, which needs NVIDIA's container toolkit"
            ),
            "sudo -n nvidia-ctk runtime configure --runtime=docker >/dev/null && sudo -n systemctl restart docker",
            'sudo -n chgrp "$(id -gn)" /var/run/docker.sock',
            "fi",
        ]
    return "\n".join(lines)


def _pull(image: str, variables: Mapping[str, str], *, may_install: bool) -> Step:
    quoted = shlex.quote(image)
    has = f"docker image inspect {quoted} >/dev/null 2>&1"
    login, sends = _login(image, variables, may_install=may_install)
    lines = [needs("docker", f"docker:{image}"), f"{has} && exit 0"]
    if login:
        folder = "DOCKER_CONFIG=$(mktemp -d) && export DOCKER_CONFIG && trap 'rm -rf \"$DOCKER_CONFIG\"' EXIT"
        lines += [folder, f"{login} || exit 1"]
    lines.append(f"docker pull --quiet {quoted}")
    return Step("image", f"pulling {image}", "\n".join(lines), TRANSFER_S, sends)


def _login(image: str, variables: Mapping[str, str], *, may_install: bool) -> tuple[str, Content | None]:
    """Return a script that logs in, "" if none is needed or possible, and what it reads."""
    host = registry_of(image)
    user, password = variables.get(USERNAME), variables.get(PASSWORD)
    if user and password:
        where = f" {shlex.quote(host)}" if host else ""
        command = f"docker login --username {shlex.quote(user)} --password-stdin{where} >/dev/null"
        return command, Content(password.encode())
    if not may_install:
        return "", None  # an own host is logged in as its user wants it
    if ecr := _ECR.fullmatch(host):
        token = f"{aws_program()} ecr get-login-password --region {ecr[2]}"
        return _by_token(token, "AWS", host, "clouds.aws.instance_profile"), None
    if _GOOGLE.fullmatch(host):
        return _by_token(
            _python(_GOOGLE_PROGRAM), "oauth2accesstoken", host, "clouds.gcp.service_account"
        ), None
    if _AZURE.fullmatch(host):
        token = _python(_AZURE_PROGRAM.replace("HOST", host))
        return _by_token(token, "00000000-0000-0000-0000-000000000000", host, "clouds.azure.identity"), None
    return "", None


def _by_token(token: str, user: str, host: str, setting: str) -> str:
    """Return where the machine has no identity that the registry takes, the pull is tried anyway: the image may be public."""
    advice = (
        f"this machine has no identity for {host}: set {setting}, or the secrets {USERNAME} and {PASSWORD}"
    )
    return (
        f'{{ p=$({token}) && printf %s "$p" | docker login --username {user} --password-stdin {host} >/dev/null || '
        f"echo {shlex.quote(advice)} >&2; }}"
    )


def _python(program: str) -> str:
    return f"python3 -c {shlex.quote(program.strip())}"


# No proxy: the address of the metadata service is the machine's own network's.
_GOOGLE_PROGRAM = """
import json, urllib.request as u
r = u.Request("http://169.254.169.254/computeMetadata/v1/instance/service-accounts/default/token",
              headers={"Metadata-Flavor": "Google"})
print(json.load(u.build_opener(u.ProxyHandler({})).open(r, timeout=10))["access_token"])
"""

# The registry gives a refresh token of its own for a token of Azure.
_AZURE_PROGRAM = """
import json, urllib.parse as p, urllib.request as u
m = "http://169.254.169.254/metadata/identity/oauth2/token?api-version=2018-02-01&resource=https://management.azure.com/"
r = u.Request(m, headers={"Metadata": "true"})
t = json.load(u.build_opener(u.ProxyHandler({})).open(r, timeout=10))["access_token"]
d = p.urlencode({"grant_type": "access_token", "service": "HOST", "access_token": t}).encode()
print(json.load(u.urlopen("https://HOST/oauth2/exchange", d, timeout=20))["refresh_token"])
"""
