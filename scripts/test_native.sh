#!/usr/bin/env bash
# Run the load balancer's tests as a wheel installs it: compiled. In a copy of the checkout.
#   scripts/test_native.sh [PYTEST_ARGUMENT…]     all of them, or those named
#   scripts/test_native.sh --streams              those of the path of a response, which CI runs
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$PWD/.venv/bin/python
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
git ls-files --cached --others --exclude-standard -z | tar --null --files-from=- --create --file=- | tar --extract --directory="$copy"
cp lb/proxy/_fast_path*.so "$copy/lb/proxy/" 2>/dev/null || true  # an editable install has it
cd "$copy"
export PYTHONPATH=$copy
"$python" hatch_build.py "$copy" >build.log || { tail -n 20 build.log >&2; exit 1; }
echo "$(tail -n 1 build.log), ready after $SECONDS s"
"$python" -c 'import lb.http.request_head as compiled; assert compiled.__file__.endswith(".so"), compiled.__file__'
if [ "${1:-}" = --streams ]; then
  set -- tests/unit/test_lb_{body_framing,fast_path,fast_path_strip,messages,relays,resume_request,sse,stream_merge,transcript}.py \
    tests/integration/test_lb_{fault_barrier,long_streams,torture}.py
elif [ "$#" = 0 ]; then
  set -- tests/unit/test_lb_*.py tests/unit/test_routing_*.py tests/integration/test_lb_*.py
fi
"$python" -m pytest --numprocesses=2 --dist=loadfile "$@"
