#!/usr/bin/env bash
# Run the load balancer's tests as a wheel installs it: compiled. In a copy of the checkout.
#   scripts/test_native.sh [PYTEST_ARGUMENT…]     all of them, or those named
#   scripts/test_native.sh --compare              all of them, beside random requests to a compiled and an interpreted agent: for CI
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
checkout=$PWD
python=$checkout/.venv/bin/python
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files --cached --others --exclude-standard -z | tar --null --files-from=- --create --file=- | tar --extract --directory="$copy"
cp lb/proxy/_fast_path*.so "$copy/lb/proxy/" 2>/dev/null || true  # an editable install has it
cd "$copy"
export PYTHONPATH=$copy
nice "$python" hatch_build.py "$copy" >build.log || { tail -n 20 build.log >&2; exit 1; }
echo "$(tail -n 1 build.log), ready after $SECONDS s"
"$python" -c 'import lb.http.request_head as compiled; assert compiled.__file__.endswith(".so"), compiled.__file__'
comparison=
if [ "${1:-}" = --compare ]; then
  shift
  nice "$python" "$checkout/scripts/compare_builds.py" "$copy" --seconds 75 >compare.log 2>&1 &
  comparison=$!
fi
if [ "$#" = 0 ]; then
  set -- tests/unit/test_lb_*.py tests/unit/test_routing_*.py tests/integration/test_lb_*.py
fi
echo "load balancer: compiled, for these tests"
"$python" -m pytest --numprocesses="${WORKERS:-4}" --dist=loadfile --no-loadscope-reorder "$@"
if [ -n "$comparison" ]; then
  wait "$comparison" || { tail -n 40 compare.log >&2; exit 1; }
  tail -n 1 compare.log
fi
