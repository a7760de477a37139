#!/usr/bin/env bash
# Print the tests of the controller's kernel: the files about the controller and its database that import none of its parts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
parts='skyserve_cli\.(controller\.(backup|callbacks|dashboard|metrics|notify|teams|upload_part|uploads)|commands|deployment|engine)'
grep -rlE 'skyserve_cli\.(controller|state)' tests/unit tests/integration --include='test_*.py' | xargs grep -LE "$parts" | sort
echo tests/docs/test_kernel.py
echo tests/sim
