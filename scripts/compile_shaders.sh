#!/usr/bin/env bash
# Compiles every Metal source of a folder by Apple's compiler: `compile_shaders.sh FOLDER`. Prints
# what the compiler says of each source that it refuses or warns of, and fails if it refuses one or
# if there is none. STANDARD names the language, metal3.1 by default, the oldest that anyflex needs.
# Sources in the folder metal4 are of Metal 4: they are left out, in a line of their own, where the
# compiler is older.
set -uo pipefail
if (($# != 1)); then
  sed -n '2,6p' "$0" >&2
  exit 2
fi
standard=${STANDARD:-metal3.1}
folder=$1 refused=0 compiled=0 left=0
xcrun -sdk macosx metal --version || exit 1
metal4=(-std=metal4.0 -mmacosx-version-min=26.2)
has_metal4=1
xcrun -sdk macosx metal "${metal4[@]}" -x metal -c /dev/null -o /dev/null 2>/dev/null || has_metal4=0
while IFS= read -r source; do
  options=("-std=$standard")
  if [[ $source == */metal4/* ]]; then
    options=("${metal4[@]}")
    if ((!has_metal4)); then
      left=$((left + 1))
      continue
    fi
  fi
  if xcrun -sdk macosx metal "${options[@]}" -c "$source" -o /dev/null; then
    compiled=$((compiled + 1))
  else
    echo "refused: $source"
    refused=$((refused + 1))
  fi
done < <(find "$folder" -name '*.metal' | sort)
((left == 0)) || echo "$left left out: this compiler has no metal4.0; Xcode 26.2 has"
echo "$compiled compiled, $refused refused"
((compiled > 0 && refused == 0))
