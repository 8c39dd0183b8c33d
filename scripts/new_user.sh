#!/usr/bin/env bash
# README's commands of "Try it" in a fresh clone of what is committed, as a new user types them, but
# for `make test`: a trained toy, and a comparison with torch that is printed. Prints the time of
# each. Fails if one fails, or if they take more than NEW_USER_SECONDS, by default 300, in all: ask
# on an idle machine. Packages come from the index, or from pip's cache.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
git clone -q . "$folder/anyflex"
cd "$folder/anyflex"
commands=$(sed -n '/^## Try it/,/^## /s/^\$ \([^#]*[^# ]\).*/\1/p' README.md | grep -vx 'make test')
began=$SECONDS
while IFS= read -r command; do
  echo "== $command"
  before=$SECONDS
  # Not with the variables of the make that runs this.
  env -u MAKEFLAGS -u MAKELEVEL -u VENV -u TORCH bash -c "$command" </dev/null
  echo "== $command: $((SECONDS - before)) s"
done <<<"$commands"
took=$((SECONDS - began)) limit=${NEW_USER_SECONDS:-300}
echo "== a new user's first minutes: $took s, at most $limit"
((took <= limit))
