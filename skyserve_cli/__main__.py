"""`serve`, and `python -m skyserve_cli`."""

from __future__ import annotations

import sys

from skyserve_cli.app import run


def main() -> None:
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
