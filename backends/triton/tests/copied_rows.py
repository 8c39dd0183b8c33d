"""By which copies Hopper's forward loads rows that TMA doesn't; no device is needed.

    python backends/triton/tests/copied_rows.py bfloat16:100 ...

Prints a line for each type and head dim: these, and the bytes of its asynchronous copies. Run as a
script, without TRITON_INTERPRET, by `test_compiled_hopper`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import triton

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from triton_compiles import compile_entries

_COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], 0x(\w+)")


def main() -> int:
    """Compile and print."""
    compile_kernel, codes = triton.compile, []

    def noted(*args: Any, **settings: Any) -> Any:
        made = compile_kernel(*args, **settings)
        codes.append(made.asm["ptx"])
        return made

    triton.compile = noted
    for argument in sys.argv[1:]:
        dtype, _, dim = argument.partition(":")
        codes.clear()
        list(compile_entries("hopper", dtype, int(dim), ("causal",), ("forward",), True))
        sizes = {int(size, 16) for code in codes for size in _COPY.findall(code)}
        print(dtype, dim, *sorted(sizes), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
