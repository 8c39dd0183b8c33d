#!/usr/bin/env bash
# Compiles every Metal source of a folder by Apple's compiler: `compile_shaders.sh FOLDER`. Prints
# what the compiler says of each source that it refuses or warns of, and fails if it refuses one or
# if there is none. STANDARD names the language, metal3.1 by default, the oldest that anyflex needs.
set -uo pipefail
if (($# != 1)); then
  sed -n '2,4p' "$0" >&2
  exit 2
fi
standard=${STANDARD:-metal3.1}
folder=$1 refused=0 compiled=0
xcrun -sdk macosx metal --version || exit 1
while IFS= read -r source; do
  if xcrun -sdk macosx metal "-std=$standard" -c "$source" -o /dev/null; then
    compiled=$((compiled + 1))
  else
    echo "refused: $source"
    refused=$((refused + 1))
  fi
done < <(find "$folder" -name '*.metal' | sort)
echo "$compiled compiled, $refused refused"
((compiled > 0 && refused == 0))
