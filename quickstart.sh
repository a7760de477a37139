#!/usr/bin/env bash
# From a bare Linux machine with Python 3.11 or newer to a streamed response of a service on three spot replicas.
# May be run again: what is there already is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

# The product alone. Its Python modules start at once; the compiled load balancer is for busy endpoints (README.md, "Install").
# An environment for development (.venv/stamp) has this folder itself; another one is installed again once a file has changed.
changed() {
    find pyproject.toml lb policies provisioners skyserve skyserve_cli -type f -not -name '*.pyc' -newer .venv/bin/serve -print -quit
}
if ! [ -x .venv/bin/serve ] || { ! [ -e .venv/stamp ] && [ -n "$(changed)" ]; }; then
    python=${PYTHON:-python3}
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "Python 3.11 or newer is needed; name one with PYTHON=/path/to/python." >&2
        exit 1
    }
    echo "installing into .venv with $("$python" --version) …" >&2
    "$python" -m venv .venv || {
        echo "$python cannot make virtual environments; on Debian and Ubuntu install python3-venv." >&2
        exit 1
    }
    # Python compiles the few modules that are used; pip would compile all of them, which takes half of its time.
    SKYSERVE_NATIVE=0 .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile .
fi
serve=.venv/bin/serve

if url=$("$serve" status --endpoint hello 2>/dev/null); then
    echo "hello is up already." >&2
else
    url=$("$serve" up examples/01-hello-engine/service.yaml -y)
fi

echo >&2
echo "The endpoint is $url. A streamed response (the simulated engine writes random words):" >&2
ask='{"model": "llama-3.1-8b", "stream": true, "max_tokens": 24,
      "messages": [{"role": "user", "content": "What is a spot instance?"}]}'
if command -v curl >/dev/null; then
    curl --no-buffer --silent --show-error --fail "$url/v1/chat/completions" \
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
    serve status --watch                    see the replicas and what they cost (best in a second terminal)
    serve local preempt us-a                take what runs in one zone away, as a spot market would
    serve events hello                      read what happened and why
    serve update hello examples/01-hello-engine/service.yaml --set replicas=4
    serve down hello                        end it: nothing is left behind

The load balancer runs as Python modules here. For a busy endpoint compile it (README.md, "Install"): pip install --force-reinstall --no-deps .
END
