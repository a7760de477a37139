#!/usr/bin/env bash
# Set up what is missing and run the tests. Arguments go to pytest.
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE  # each of the thousands of processes in the tests would compile what it imports
cd "$(dirname "${BASH_SOURCE[0]}")"
scripts/venv.sh
# Half of the time tests wait for processes and sockets, so there is one more than CI has cores; in the order of the
# folders, so that what is long does not come last.
exec .venv/bin/pytest --numprocesses=3 --dist=loadfile --no-loadscope-reorder "$@"
