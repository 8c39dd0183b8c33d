#!/usr/bin/env bash
# The whole conformance kit on the CPU backend, once at each instruction-set level that this
# processor runs: each level is other machine code. `cpu_conformance.sh PYTHON [ARGUMENTS]`;
# arguments go to `anyflex conformance`.
# Runs every level even if one fails, says which did, and fails if one did.
set -euo pipefail
python=$1
shift

levels=$("$python" -c 'from anyflex_cpu import library; print(*library.load().available())')
failed=()
for level in $levels; do
  echo "== ANYFLEX_CPU_ISA=$level"
  ANYFLEX_CPU_ISA=$level "$python" -m anyflex conformance --backend cpu \
    --require forward,backward,decode "$@" || failed+=("$level")
done

if ((${#failed[@]})); then
  echo "failed at: ${failed[*]}" >&2
  exit 1
fi
