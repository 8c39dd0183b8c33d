#!/usr/bin/env bash
# The CPU backend's native library by itself: `native_checks.sh sanitize`, `arm`, `clang`.
#   sanitize  AddressSanitizer with UndefinedBehaviorSanitizer, then ThreadSanitizer, every level
#             that this processor runs. PROBLEMS=N of each level (default 400).
#   arm       the portable level, cross-compiled and executed by qemu-user. It needs
#             g++-aarch64-linux-gnu and qemu-user.
#   clang     built by clang, as on macOS and Windows: CLANG=clang++-19 names it (default clang++).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../backends/cpu/native"
problems=${PROBLEMS:-400}
builds=../build

build() {  # folder, options of cmake
  cmake -S . -B "$1" -DAF_TESTS=ON -DCMAKE_BUILD_TYPE=Release "${@:2}" >/dev/null
  cmake --build "$1" --target native_test --parallel "$(nproc)" >/dev/null
}

case ${1:-} in
  sanitize)
    build "$builds/address" -DAF_SANITIZE=address,undefined
    UBSAN_OPTIONS=print_stacktrace=1 "$builds/address/native_test" "$problems" 1 3
    build "$builds/thread" -DAF_SANITIZE=thread
    TSAN_OPTIONS=halt_on_error=1 "$builds/thread/native_test" "$problems" 2 4
    ;;
  arm)
    for tool in aarch64-linux-gnu-g++ qemu-aarch64; do
      command -v "$tool" >/dev/null || { echo "$tool isn't here; apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 3; }
    done
    build "$builds/aarch64" "-DCMAKE_TOOLCHAIN_FILE=$PWD/tests/aarch64.cmake"
    qemu-aarch64 -L /usr/aarch64-linux-gnu "$builds/aarch64/native_test" "$problems" 3 3
    ;;
  clang)
    clang=${CLANG:-clang++}
    command -v "$clang" >/dev/null || { echo "$clang isn't here; apt-get install clang, or CLANG=its name" >&2; exit 3; }
    build "$builds/clang" "-DCMAKE_CXX_COMPILER=$clang"
    "$builds/clang/native_test" "$problems" 5 3
    ;;
  *)
    sed -n '2,7p' "../../../scripts/native_checks.sh" >&2
    exit 2
    ;;
esac
