#!/usr/bin/env bash
# Installs clang++-19, by which the tests of backends/mps execute Metal kernels on a CPU: by apt-get,
# as root or by a sudo that asks for no password. Changes nothing where it is there already. Fails
# where it stays missing.
set -euo pipefail
if command -v clang++-19; then
  exit 0
fi
if ! command -v apt-get >/dev/null; then
  echo "clang++-19 is missing and there is no apt-get: install Clang 19 by hand" >&2
  exit 1
fi
as_root=()
if ((EUID != 0)); then
  as_root=(sudo -n)
  if ! "${as_root[@]}" true; then
    echo "clang++-19 is missing and this is not root: run apt-get install -y clang-19" >&2
    exit 1
  fi
fi
echo "installing clang-19, which compiles Metal kernels for the emulator of backends/mps"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq clang-19
command -v clang++-19
