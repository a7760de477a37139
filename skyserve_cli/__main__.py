"""`serve`, and `python -m skyserve_cli`."""

from __future__ import annotations

import gc
import sys


def main() -> None:
    gc.disable()  # what is imported stays, so to collect meanwhile is a sixth of the start for nothing; `run` enables it
    from skyserve_cli.app import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
