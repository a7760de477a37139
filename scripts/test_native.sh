#!/usr/bin/env bash
# Run the load balancer's tests as a wheel installs it: compiled. In a copy of the checkout; takes some fifteen minutes.
#   scripts/test_native.sh [PYTEST_ARGUMENT…]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$PWD/.venv/bin/python
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files --cached --others --exclude-standard -z | tar --null --files-from=- --create --file=- | tar --extract --directory="$copy"
cp lb/proxy/_fast_path*.so "$copy/lb/proxy/" 2>/dev/null || true  # an editable install has it
cd "$copy"
export PYTHONPATH=$copy
"$python" hatch_build.py "$copy"
"$python" -c 'import lb.http.request_head as compiled; assert compiled.__file__.endswith(".so"), compiled.__file__'
if [ "$#" = 0 ]; then
  # Left out are those that put classes of their own in the place of compiled ones, which accept none then.
  left_out='test_lb_(accounts|fault_barrier|front_doors|loads|torture|relays|scheduler|targets)\.py$'
  mapfile -t files < <(ls tests/unit/test_lb_*.py tests/unit/test_routing_*.py tests/integration/test_lb_*.py | grep -vE "$left_out")
  set -- "${files[@]}"
fi
"$python" -m pytest --numprocesses=2 --dist=loadfile "$@"
