"""Check that what is installed is what a wheel should have: compiled, with the parts in C, and a load balancer that starts."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path


def main() -> int:
    import lb.core.api_keys
    import lb.proxy._fast_path
    from provisioners.remote.host_agent import tls_relay

    for module in (lb.core.api_keys, lb.proxy._fast_path):
        if not str(module.__file__).endswith(".so"):
            print(f"{module.__name__} is not compiled: {module.__file__}", file=sys.stderr)
            return 1
    lb.proxy._fast_path.FastPath(2).close()
    ctypes.CDLL(str(Path(tls_relay.__file__).with_name(tls_relay.LIBRARY)))
    subprocess.run([sys.executable, "-m", "lb", "--help"], check=True, stdout=subprocess.DEVNULL, timeout=60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
