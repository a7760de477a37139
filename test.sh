#!/usr/bin/env bash
# Set up what is missing and run the tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
scripts/venv.sh
exec .venv/bin/pytest --numprocesses=2 --dist=loadfile "$@"
