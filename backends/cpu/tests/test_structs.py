"""Layout of the C ABI on the Python side, compared with a C compiler's for the header."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anyflex.plugin import DTYPES
from anyflex_cpu import structs

HEADER = Path(__file__).parents[1] / "native" / "include" / "anyflex_cpu.h"
COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "af_tensor": structs.Tensor,
    "af_captured": structs.Captured,
    "af_mod_inputs": structs.ModInputs,
    "af_error": structs.Error,
    "af_tile": structs.Tile,
    "af_program": structs.Program,
    "af_runs": structs.Runs,
    "af_pages": structs.Pages,
    "af_scales": structs.Scales,
    "af_problem": structs.Problem,
    "af_forward_args": structs.ForwardArgs,
    "af_packed_args": structs.PackedArgs,
    "af_backward_args": structs.BackwardArgs,
}
"""The header's name -> class."""


def from_python() -> Iterator[str]:
    for name, kind in STRUCTS.items():
        yield f"{name} {ctypes.sizeof(kind)}"
        for field in kind._fields_:
            yield f"{name}.{field[0]} {getattr(kind, field[0]).offset}"


def program() -> str:
    lines = []
    for name, kind in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field in kind._fields_:
            where = f"offsetof({name}, {field[0]})"
            lines.append(f'printf("{name}.{field[0]} %zu\\n", {where});')
    lines += ['printf("abi %d\\n", AF_ABI);', 'printf("types %d\\n", AF_T_F64);']
    head = '#include <stddef.h>\n#include <stdio.h>\n#include "anyflex_cpu.h"\n'
    return head + "int main(void) {" + "\n".join(lines) + "return 0; }\n"


@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
def test_the_layouts_are_the_header_s(tmp_path: Path) -> None:
    source, probe = tmp_path / "probe.c", tmp_path / "probe"
    source.write_text(program(), encoding="utf-8")
    assert COMPILER is not None
    flags = ["-I", str(HEADER.parent), "-o", str(probe)]
    subprocess.run([COMPILER, str(source), *flags], check=True)
    printed = subprocess.run([str(probe)], check=True, capture_output=True, text=True).stdout
    *layouts, abi, types = printed.splitlines()
    assert layouts == list(from_python())
    assert abi == f"abi {structs.ABI}"
    assert types == f"types {structs.TYPE_CODES[DTYPES['f64']]}"


def scalars(value: Any) -> Iterator[float]:
    """Every scalar of a struct, in the order of the fields."""
    if isinstance(value, ctypes.Structure):
        for field in value._fields_:
            yield from scalars(getattr(value, field[0]))
    elif isinstance(value, ctypes.Array):
        for each in value:
            yield from scalars(each)
    else:
        yield value


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ((structs.TENSORS, structs.MODS), structs.Problem),
        ((structs.TENSORS, structs.MODS, structs.FORWARD), structs.ForwardArgs),
        ((structs.TENSORS, structs.MODS, structs.FORWARD, structs.PACKED), structs.PackedArgs),
        ((structs.TENSORS, structs.MODS, structs.BACKWARD), structs.BackwardArgs),
    ],
)
def test_packing_fills_each_field_in_its_place(
    parts: tuple[structs.Part, ...], kind: type[ctypes.Structure]
) -> None:
    memory = bytearray(ctypes.sizeof(kind))
    packed: list[int] = []
    for part in parts:
        count = len(part.packer.unpack(bytes(part.packer.size)))
        values = list(range(len(packed) + 1, len(packed) + 1 + count))
        part.packer.pack_into(memory, part.offset, *values)
        packed += values
    assert list(scalars(kind.from_buffer_copy(memory))) == packed
