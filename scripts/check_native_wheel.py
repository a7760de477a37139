"""Check that the installed load balancer is what a wheel should have: compiled, with the helper in C, and able to start."""

from __future__ import annotations

import subprocess
import sys


def main() -> int:
    import lb.core.api_keys
    import lb.proxy._fast_path

    for module in (lb.core.api_keys, lb.proxy._fast_path):
        if not str(module.__file__).endswith(".so"):
            print(f"{module.__name__} is not compiled: {module.__file__}", file=sys.stderr)
            return 1
    lb.proxy._fast_path.FastPath(2).close()
    subprocess.run([sys.executable, "-m", "lb", "--help"], check=True, stdout=subprocess.DEVNULL, timeout=60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
