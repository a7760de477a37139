#!/usr/bin/env bash
# Set up what is missing and run the tests. Arguments go to pytest.
#   ./test.sh           all tests but those marked `long`, with fewer examples of each property: about seven minutes
#   ./test.sh --all     all tests: about twenty minutes
#   ./test.sh --kernel  those of the controller's kernel: what needs no part of it, and the simulated lives of services
#   ./test.sh FILE…     all tests of these files, folders or test ids
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE  # each of the thousands of processes in the tests would compile what it imports
cd "$(dirname "${BASH_SOURCE[0]}")"
selection=(-m "not long and not engine" --hypothesis-profile=quick)
arguments=()
for argument in "$@"; do
  if [ "$argument" = --all ]; then
    selection=()
    continue
  fi
  if [ "$argument" = --kernel ]; then
    mapfile -t arguments < <(scripts/kernel_tests.sh)
    continue
  fi
  if [ -e "${argument%%::*}" ]; then selection=(); fi
  arguments+=("$argument")
done
scripts/venv.sh
# Tests that start processes wait for half of their time, so there are twice as many workers as CI has cores. `tests/conftest.py` spreads
# these tests among those that compute, so that both kinds run side by side.
exec .venv/bin/pytest --numprocesses="${WORKERS:-4}" --dist=loadfile --no-loadscope-reorder "${selection[@]}" "${arguments[@]}"
