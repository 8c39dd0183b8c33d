#!/usr/bin/env bash
# What a machine with NVIDIA GPUs can tell: `nvidia_checks.sh PYTHON check|first-calls|measure FOLDER`.
#   check        the whole conformance kit on `cuda`, on `cuda.triton`, and on that with the
#                configurations of Intel's GPUs; 500 random calls of `cuda`; calls of each of its
#                kernels, the presets' among them, 1,000 times, and under compute-sanitizer; errors
#                beside the peers'; the device tests
#   first-calls  what first calls of both backends take, with and without kernels on disk, and on a
#                second machine that has loaded what the first one saved
#   measure      every preset of both beside the peers, then the targets. Kernels must lie in
#                their caches on disk: the first run of two compiles them (some 6 and 9 minutes)
# Each step's output is FOLDER/<step>.log, each report FOLDER/<step>.json; FOLDER/summary.txt has
# the steps' exit statuses and seconds. Runs every step even if one fails, and fails if one did.
# With two GPUs, the first two that CUDA_VISIBLE_DEVICES lets it see, half of the steps of check and
# measure run on each. PEERS names `cuda`'s contenders, JOBS the processes of a kit and of random
# calls, ROUNDS those of a measurement.
set -euo pipefail
if (($# != 3)); then
  sed -n '2,14p' "$0" >&2
  exit 2
fi
python=$1 mode=$2
mkdir -p "$3"
folder=$(cd "$3" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."
peers=${PEERS:-torch.sdpa.cudnn,torch.flex,torch.flex.flash,cuda.flash4}
# Not all: the other steps need some processors beside the kit. And each has memory of the GPU.
share=$(($(nproc) * 5 / 8 + 1))
jobs=${JOBS:-$((share < 32 ? share : 32))}
rounds=${ROUNDS:-7}
indices=$(nvidia-smi --query-gpu=index --format=csv,noheader || true)
IFS=$', \n' read -r -d '' -a gpus <<<"${CUDA_VISIBLE_DEVICES-$indices}" || true
if ((${#gpus[@]} == 0)); then
  echo "no NVIDIA GPU is here, or CUDA_VISIBLE_DEVICES names none" >&2
  exit 3
fi
: >"$folder/summary.txt"

step() {  # name, which of the two GPUs, command
  local name=$1 visible=${gpus[$2]} began=$SECONDS status=0
  # The other one too, as the second: some tests want two.
  if ((${#gpus[@]} > 1)); then visible+=,${gpus[1 - $2]}; fi
  shift 2
  CUDA_VISIBLE_DEVICES=$visible "$@" >"$folder/$name.log" 2>&1 || status=$?
  echo "$name: status $status, $((SECONDS - began)) s" | tee -a "$folder/summary.txt"
}

preset() {  # name, GPU, preset, contenders, options
  step "$1" "$2" "$python" -m anyflex bench --preset "h200-$3" --backend "$4" \
    --rounds "$rounds" --json "$folder/$1.json" "${@:5}"
}

targets() {  # backend, steps whose reports count
  local backend=$1
  shift
  local reports=("${@/#/$folder/}")
  step "targets-$backend" 0 "$python" bench/gpu_targets.py --backend "$backend" "${reports[@]/%/.json}"
}

# Two lists of steps: on two GPUs side by side, on one after the other, so that no measurement
# shares its GPU.
side_by_side() {
  if ((${#gpus[@]} > 1)); then
    "$1" 0 &
    "$2" 1
    wait
  else
    "$1" 0
    "$2" 0
  fi
}

kit_and_random_on() {
  step kit "$1" "$python" -m anyflex conformance --backend cuda --jobs "$jobs"
  # If it is stopped, its report has the calls that had ended.
  step random "$1" "$python" bench/gpu_random.py --backend cuda --count 500 --jobs "$jobs" \
    --json "$folder/random.json"
}
others_on() {
  step device "$1" "$python" -m pytest -q -n 6 tests/device
  step kit-triton "$1" "$python" -m anyflex conformance --backend cuda.triton --jobs "$jobs"
  step kit-intel "$1" "$python" backends/xpu/tests/on_nvidia.py --jobs "$jobs"
  step precision "$1" "$python" bench/gpu_precision.py --backend "cuda,cuda.triton,$peers" \
    --jobs "$jobs" --json "$folder/precision.json"
  step repeats "$1" "$python" bench/gpu_random.py --backend cuda --each-kernel --repeat 1000 \
    --jobs 10
  step sanitizer "$1" "$python" bench/gpu_sanitizer.py
}

first_calls() {  # backend
  step "first-calls-$1" 0 "$python" bench/gpu_first_calls.py --backend "$1" \
    --json "$folder/first-calls-$1.json"
}

prefill_on() {
  preset plain "$1" plain "cuda,$peers"
  preset mods "$1" mods "cuda,$peers"
}
portable_prefill_on() {
  preset decode-graph "$1" decode "cuda,$peers,cuda.triton" --clock graph
  preset triton-plain "$1" plain cuda.triton,torch.flex,torch.sdpa.cudnn
  preset triton-mods "$1" mods cuda.triton,torch.flex,torch.sdpa.cudnn
}

case $mode in
  check) side_by_side kit_and_random_on others_on ;;
  # One after the other: what they time is the host's work.
  first-calls)
    first_calls cuda
    first_calls cuda.triton
    step portable-artifacts 0 "$python" bench/portable_artifacts.py \
      --backends cuda,cuda.triton --json "$folder/portable-artifacts.json"
    ;;
  measure)
    side_by_side prefill_on portable_prefill_on
    # By themselves: these wait for the host.
    preset decode 0 decode "cuda,$peers,cuda.triton"
    preset small-graph 0 small "cuda,$peers" --clock graph
    preset small-wall 0 small "cuda,$peers" --clock wall
    preset strangers 0 strangers "cuda,$peers"
    step targets-strangers 0 "$python" bench/stranger_targets.py "$folder/strangers.json"
    targets cuda plain mods decode decode-graph small-graph small-wall
    targets cuda.triton triton-plain triton-mods decode decode-graph
    ;;
  *)
    sed -n '2,14p' "$0" >&2
    exit 2
    ;;
esac
! grep -v ': status 0,' "$folder/summary.txt"
