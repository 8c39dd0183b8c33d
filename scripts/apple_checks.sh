#!/usr/bin/env bash
# What a Mac with Apple silicon can tell: `apple_checks.sh PYTHON FOLDER`. One step after another:
#   doctor   versions, the GPU, what the backend's probe says
#   gpu      tests marked `mps`; the first launch runs the backend's self-test
#   shaders  every shader through Apple's compiler, where Xcode's command line tools have one
#   kit      the whole conformance kit
#   bench    forward and backward beside the peers that torch has on the Mac
# FOLDER/report.txt has each step's output, exit status and seconds; FOLDER/shaders the sources.
# Runs every step even if one fails, and fails if one did. It works with the bash 3.2 of macOS.
set -uo pipefail
if (($# != 2)); then
  sed -n '2,9p' "$0" >&2
  exit 2
fi
case $1 in
  */*) python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1") ;;
  *) python=$1 ;;
esac
mkdir -p "$2"
folder=$(cd "$2" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
report=$folder/report.txt
: >"$report"
failed=0

step() {  # name, command
  local name=$1 began=$SECONDS status
  shift
  echo "== $name: $*" | tee -a "$report"
  "$@" 2>&1 | tee -a "$report"
  status=${PIPESTATUS[0]}
  echo "== $name: status $status, $((SECONDS - began)) s" | tee -a "$report"
  ((status == 0)) || failed=1
}

gpu_tests() {
  (cd backends/mps && "$python" -m pytest -q -m mps tests/test_gpu.py)
}

compile_shaders() {
  rm -rf "$folder/shaders"
  "$(dirname "$python")/anyflex-mps" dump-shaders "$folder/shaders" || return
  if ! xcrun -sdk macosx --find metal >/dev/null 2>&1; then
    echo "no Metal compiler: xcode-select --install, then xcodebuild -downloadComponent MetalToolchain"
    return 0
  fi
  bash scripts/compile_shaders.sh "$folder/shaders"
}

bench() {
  "$python" -m anyflex bench --device mps --dtype fp16 --mask causal --clock wall --rounds 5 \
    --shape 1x8x4096x64 --shape 1x8x4096x128 --direction forward,backward \
    --json "$folder/bench.json"
}

step doctor "$python" -m anyflex doctor
step gpu gpu_tests
step shaders compile_shaders
step kit "$python" -m anyflex conformance --backend mps --require all --json "$folder/kit.json"
step bench bench
echo "report: $report"
exit "$failed"
