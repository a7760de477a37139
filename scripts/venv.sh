#!/usr/bin/env bash
# Make .venv with the product and its development tools; quick when nothing has changed. Prints nothing on success.
# PYTHON names the interpreter to use.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
  local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11)
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$candidate"; return; }
  done
  echo "Python 3.11 or newer is needed (tried: ${candidates[*]}); install it, or name one with PYTHON=/path/to/python." >&2
  exit 1
}

# The same for an interpreter and for its virtual environments.
identity() { "$1" -c 'import sys; print(sys.base_prefix, sys.version)' 2>/dev/null || true; }

# Without PYTHON the one of .venv stays, unless it has been replaced by another version.
sources=$(cat pyproject.toml hatch_build.py scripts/venv.sh | sha256sum | cut -d' ' -f1)
if [ "$(cat .venv/stamp 2>/dev/null || true)" != "$sources $(identity "${PYTHON:-.venv/bin/python}")" ]; then
  python=$(find_python)
  echo "setting up .venv with $("$python" --version) …" >&2
  rm -rf .venv
  "$python" -m venv .venv || {
    echo "$python cannot make virtual environments; on Debian and Ubuntu install python3-venv." >&2
    exit 1
  }
  .venv/bin/python -m pip install --quiet --upgrade pip
  .venv/bin/python -m pip install --quiet --editable . --group dev
  echo "$sources $(identity .venv/bin/python)" > .venv/stamp
fi
