#!/usr/bin/env bash
# README's first screen in a terminal, to be recorded in a home of its own:
#
#   pip install "asciinema>=2.4,<3"
#   asciinema rec --overwrite --idle-time-limit 3 --cols 110 --rows 32 -c scripts/recording.sh docs/pictures/preempted.cast
#
# `asciinema play docs/pictures/preempted.cast` shows it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
SKYSERVE_HOME=$(mktemp -d)
export SKYSERVE_HOME PATH="$PWD/.venv/bin:$PATH" TERM=xterm-256color
here=examples/09-streams-that-survive
work=$(mktemp -d)
ln -s "$PWD/examples" "$work/examples"
cd "$work"
trap 'serve down --all -y >/dev/null 2>&1 || true; serve controller stop >/dev/null 2>&1 || true; rm -rf "$work" "$SKYSERVE_HOME"' EXIT

run() {
  printf '\033[1;32m$\033[0m '
  local at
  for ((at = 0; at < ${#1}; at++)); do printf '%s' "${1:at:1}"; sleep 0.02; done
  printf '\n'
  eval "$1"
}

run "serve up $here/service.yaml -y"
run "url=\$(serve status --endpoint saga)"
run "python3 $here/ask.py \$url > undisturbed.txt"
run "python3 $here/ask.py \$url | tee survived.txt & sleep 4; serve local preempt saga/1; sleep 3; serve local preempt saga/2; wait"
run "cmp undisturbed.txt survived.txt && echo the same text"
run "serve status saga"
run "serve events saga | tail -n 12"
run "serve report saga"
run "serve down saga -y"
sleep 2
