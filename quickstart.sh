#!/usr/bin/env bash
# From a bare Linux machine with Python to a streamed answer of a service on three spot replicas. May be run again.
set -euo pipefail
cd "$(dirname "$0")"

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3 python3.14; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null || continue
        "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue
        echo "$candidate"
        return
    done
    echo "quickstart needs Python 3.11 or newer with its venv module (on Debian and Ubuntu: apt install python3-venv);" \
        "set PYTHON to one that is installed elsewhere." >&2
    exit 1
}

serve=.venv/bin/serve
if ! "$serve" --version >/dev/null 2>&1; then
    python=$(find_python)
    echo "Installing into .venv with $("$python" --version) ..." >&2
    "$python" -m venv --clear .venv
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable .
fi

if url=$("$serve" status --endpoint hello 2>/dev/null); then
    echo "hello is up already." >&2
else
    url=$("$serve" up examples/01-hello-engine/service.yaml -y)
fi

echo >&2
echo "The endpoint is $url. A streamed answer (an imitation of an engine says words, not sense):" >&2
ask='{"model": "llama-3.1-8b", "stream": true, "max_tokens": 24,
      "messages": [{"role": "user", "content": "What is a spot instance?"}]}'
if command -v curl >/dev/null; then
    curl --no-buffer --silent --show-error --fail-with-body "$url/v1/chat/completions" \
        --header 'Content-Type: application/json' --data "$ask"
else
    .venv/bin/python -c '
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
for line in urllib.request.urlopen(request):
    print(line.decode(), end="", flush=True)
' "$url/v1/chat/completions" "$ask"
fi

cat >&2 <<END

That came from one of three replicas in three regions. What to try next:

    source .venv/bin/activate
    serve status --watch                    see the replicas, and what they cost
    serve local preempt hello/1             take one away, as a spot market would (from a second terminal)
    serve events hello                      read what happened and why
    serve update hello examples/01-hello-engine/service.yaml --set replicas=4
    serve down hello                        end it: nothing is left behind
END
