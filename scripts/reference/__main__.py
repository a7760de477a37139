"""Write the pages below docs/reference/, or with --check compare them with the code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from scripts.reference import cli, metrics, openapi, service_file
from scripts.reference.operations import ADMIN, CONTROLLER

FOLDER = Path(__file__).parents[2] / "docs" / "reference"


def pages() -> dict[str, str]:
    """Returns the text of every generated file by its name."""
    controller, admin = "openapi-controller.json", "openapi-admin.json"
    return {
        "service-file.md": service_file.page(),
        "commands.md": cli.page(),
        "metrics.md": metrics.page(),
        "controller-api.md": openapi.page(
            "Controller API",
            "The controller serves this API on a Unix socket in its home, `$SKYSERVE_HOME/controller.sock`, and on a port if "
            "`controller.listen` names one. Every request needs `Authorization: Bearer TOKEN`; a token without the role that a "
            'route needs gets 403 ([roles](../howto/teams.md)). Errors are `{"error": "a sentence"}`.',
            CONTROLLER,
            controller,
        ),
        "admin-api.md": openapi.page(
            "Load balancer admin API",
            "Every agent serves this API on its admin port, which is not the port for clients. Every request needs `Authorization: "
            "Bearer TOKEN`. What is wrong in a body is named with its path, and changes nothing.",
            ADMIN,
            admin,
        ),
        controller: openapi.document("SkyServe controller", CONTROLLER),
        admin: openapi.document("SkyServe load balancer admin API", ADMIN),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.reference", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page is out of date"
    )
    args = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    stale = []
    for name, text in pages().items():
        path = FOLDER / name
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if not args.check:
                path.write_text(text)
    if args.check and stale:
        print(f"out of date: {', '.join(stale)}; run python -m scripts.reference", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
