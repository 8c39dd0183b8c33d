"""Text that several kernels share: header, signature, staged rows, fragments, walks along runs.

Kernels are templates: ``$name`` stands for a number, a name or an expression, and alone on a line
for lines of its own. A fragment is 8x8; a lane holds columns ``c`` and ``c + 1`` of row ``r``.
Apple documents no such layout: `self_test` asks the device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import indent

import torch

from anyflex.plugin import Spec
from anyflex_mps.arguments import place
from anyflex_mps.mods import captured_arguments, captured_buffers
from anyflex_mps.tiles import Tile, pitch_of, whole_fragments

__all__ = [
    "LANE_OF_COLUMN",
    "PLACE_OF_LANE",
    "TYPES",
    "Shader",
    "any_nonfinite",
    "any_of_group",
    "fill",
    "head_of",
    "index_type",
    "kernel_text",
    "load_rows_text",
    "mask_buffers",
    "mod_arguments",
    "own_fragment",
    "row_of_blocks",
    "run_bounds",
    "shifted_row",
    "staged_rows",
    "value_element",
    "zeros",
]

TYPES = {torch.float32: "float", torch.float16: "half", torch.bfloat16: "bfloat"}

_HEADER = """\
#include <metal_stdlib>
#include <metal_simdgroup_matrix>
$includes
using namespace metal;
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
"""
_IDS = (
    "uint3 group [[threadgroup_position_in_grid]]",
    "uint tid [[thread_index_in_threadgroup]]",
    "uint lane [[thread_index_in_simdgroup]]",
    "uint sg [[simdgroup_index_in_threadgroup]]",
)

PLACE_OF_LANE = """\
const int r = (int)((lane / 4 & 4) + lane / 2 % 4);
const int c = (int)((lane / 4 & 2) * 2 + lane % 2 * 2);"""

LANE_OF_COLUMN = "(ushort)((lane & 22u) | (uint)((j & 4) << 1) | (uint)((j & 2) >> 1))"
"""Lane that holds column ``j`` of this lane's row."""


@dataclass(frozen=True)
class Shader:
    """A kernel's source.

    Args:
        name: of the kernel.
        text: the whole source.
        buffers: names of its buffers, in order.
        threads: of a threadgroup.
    """

    name: str
    text: str
    buffers: tuple[str, ...]
    threads: int


def fill(template: str, **given: object) -> str:
    """Return a template with each ``$name`` replaced. Lines that stand for nothing vanish; a name
    that is missing, or given and not there, is an error."""
    names = set(re.findall(r"\$(\w+)", template))
    assert names == given.keys(), names ^ given.keys()

    def line_of(line: str) -> str:
        alone = re.fullmatch(r"( *)\$(\w+)\n?", line)
        if alone is None:
            return re.sub(r"\$(\w+)", lambda found: str(given[found[1]]), line)
        text = str(given[alone[2]]).rstrip("\n")
        return indent(text, alone[1]) + "\n" if text else ""

    return "".join(map(line_of, template.splitlines(keepends=True)))


def kernel_text(
    name: str,
    spec: Spec,
    buffers: Sequence[str],
    functions: str,
    body: str,
    threads: int,
    *,
    includes: str = "",
) -> Shader:
    """Return a kernel's source.

    Args:
        buffers: declarations of its own tensors, in order; captured tensors, ``P`` and ``F``
            follow. The kernel declares those that `functions` or `body` name.
        functions: text of the functions that it calls.
        body: statements of the kernel.
        includes: of headers beyond those that all kernels have.
    """
    known = [*buffers, *captured_buffers(spec), "constant long* P", "constant float* F"]
    words = set(re.findall(r"\w+", functions + body))
    declared = [each for each in known if each.split()[-1] in words]
    parameters = [f"{text} [[buffer({at})]]" for at, text in enumerate(declared)]
    signature = ",\n    ".join([*parameters, *_IDS])
    kernel = f"kernel void {name}(\n    {signature}) {{\n{indent(body, '  ')}}}\n"
    text = f"{fill(_HEADER, includes=includes)}\n{functions}\n{kernel}"
    return Shader(name, text, tuple(each.split()[-1] for each in declared), threads)


def mask_buffers(spec: Spec) -> list[str]:
    """Return the declarations of a mask's runs; none without a mask."""
    if spec.mask_kind == "none":
        return []
    return ["device const int* offsets", "device const int* runs"]


def index_type(spec: Spec) -> str:
    """Return the type of element offsets inside of a head."""
    return "int" if spec.index_width == 32 else "long"


def mod_arguments(spec: Spec) -> str:
    """Return a mod's arguments after score and gradient."""
    return f"{shifted_row(spec)}, kv_idx + (int){place('key_shift')}{captured_arguments(spec)}"


def shifted_row(spec: Spec) -> str:
    """Return a row's indices as mods see them: moved by `Call.index_offsets`, and a packed
    sequence's slot in place of the batch entry."""
    batch = "slot" if spec.q_layout == "packed" else "b"
    names = {batch: "batch_shift", "h": "head_shift", "q_idx": "row_shift"}
    return ", ".join(f"{name} + (int){place(shift)}" for name, shift in names.items())


def head_of(spec: Spec, tensor: str, batch: str, head: str) -> str:
    """Return the statement that declares ``<tensor>_head``, where a tensor's head begins."""
    strides = place(tensor, "batch"), place(tensor, "head")
    return (
        f"device const {TYPES[spec.dtype]}* {tensor}_head =\n"
        f"    {tensor} + (long){batch} * {strides[0]} + (long){head} * {strides[1]};"
    )


# Staged rows

_LOAD_ROWS = """\
static inline void $name(
    threadgroup $type* into, device const $type* from,$pages int first, int end, $index row_stride,
    $index column_stride, int rows, int dim, int width, int pitch, bool finite_only, uint tid) {
  for (int i = (int)tid; i < rows * width; i += $threads) {
    const int row = first + i / width;
    const int column = i % width;
    $type x = ($type)0.0f;
    if (row < end && column < dim)
      x = $element;
    if (finite_only && !isfinite((float)x))
      x = ($type)0.0f;
    into[i / width * pitch + column] = x;
  }
}
"""
_ROW_IN_PAGES = """\
static inline device const $type* row_in_pages(
    device const $type* from, device const int* pages, int last_page, long page_stride,
    $index row_stride, int row) {
  const int page = min(max(pages[row / $page_size], 0), last_page);
  return from + (long)page * page_stride + ($index)(row % $page_size) * row_stride;
}
"""
_PAGES = "\n    device const int* pages, int last_page, long page_stride,"


def load_rows_text(spec: Spec, body: str, threads: int) -> str:
    """Return ``load_rows``, if `body`, a kernel's statements, calls it: by it a threadgroup stages
    rows, zeros past their end and past the last column. ``finite_only`` stages zeros for what
    isn't finite, too.

    Of keys in pages ``load_page_rows`` follows, which finds a row by its page, and before it
    ``row_in_pages``, where a key's row begins. Page ids are clamped into the pool."""
    index = index_type(spec)
    same = {"type": TYPES[spec.dtype], "index": index}
    column = f"({index})column * column_stride]"
    element = f"from[({index})row * row_stride + {column}"
    names = {"name": "load_rows", "pages": "", "element": element}
    text = fill(_LOAD_ROWS, **same, threads=threads, **names) if "load_rows(" in body else ""
    if spec.page_size:
        text += fill(_ROW_IN_PAGES, **same, page_size=spec.page_size)
        element = f"row_in_pages(from, pages, last_page, page_stride, row_stride, row)[{column}"
        names = {"name": "load_page_rows", "pages": _PAGES, "element": element}
        text += fill(_LOAD_ROWS, **same, threads=threads, **names)
    return text


def value_element(spec: Spec, row: str, column: str) -> str:
    """Return the text of an element of value, whose head begins at ``value_head``."""
    index = index_type(spec)
    row_stride = f"({index}){place('value', 'row')}"
    offset = f"({index}){column} * ({index}){place('value', 'column')}"
    if not spec.page_size:
        return f"value_head[\n    ({index}){row} * {row_stride} + {offset}]"
    return (
        f"row_in_pages(\n    value_head, pages, last_page, {place('value', 'batch')}, "
        f"{row_stride}, {row})[\n    {offset}]"
    )


def staged_rows(
    spec: Spec,
    into: str,
    tensor: str,
    first: str,
    end: str,
    rows: int,
    *,
    finite_only: str = "false",
    width: int | None = None,
) -> str:
    """Return the call of ``load_rows``, or of ``load_page_rows``, for rows of a tensor whose head
    begins at ``<tensor>_head``.

    Args:
        width: columns of a staged row, which the next one follows; None for whole fragments of
            them, with padding.
    """
    dim = spec.value_head_dim if tensor in ("value", "dout") else spec.head_dim
    index, pitch = index_type(spec), width or pitch_of(dim, spec.dtype.itemsize)
    row, column = place(tensor, "row"), place(tensor, "column")
    function, pages = "load_rows", ""
    if spec.page_size and tensor in ("key", "value"):
        function = "load_page_rows"
        pages = f"pages, last_page, {place(tensor, 'batch')}, "
    return (
        f"{function}(\n    {into}, {tensor}_head, {pages}{first}, {end}, ({index}){row}, "
        f"({index}){column},\n    {rows}, {dim}, {width or whole_fragments(dim)}, {pitch}, "
        f"{finite_only}, "
        "tid);"
    )


# Fragments

_STAGED_FRAGMENT = """\
simdgroup_matrix<$type, 8, 8> $name;
simdgroup_load($name, $staged + (int)sg * 8 * $pitch + d * 8, $pitch);"""
_READ_FRAGMENT = """\
simdgroup_matrix<$type, 8, 8> $name;
for (int i = 0; i < 2; i++)
  $name.thread_elements()[i] = row < end_row && d * 8 + c + i < $dim
      ? $tensor_head[($index)row * ($index)$row + ($index)(d * 8 + c + i) * ($index)$column]
      : ($type)0.0f;"""


def own_fragment(spec: Spec, tile: Tile, name: str, tensor: str) -> str:
    """Return statements that make fragment ``name``, columns ``8 * d`` on, of this simdgroup's own
    rows: from staged rows, ``<name>_rows``, or from device memory, where ``row`` is this lane's
    and ``end_row`` the end of all."""
    dim = spec.value_head_dim if tensor in ("value", "dout") else spec.head_dim
    type_ = TYPES[spec.dtype]
    if tile.stages_rows:
        pitch = pitch_of(dim, spec.dtype.itemsize)
        return fill(_STAGED_FRAGMENT, type=type_, name=name, staged=f"{name}_rows", pitch=pitch)
    return fill(
        _READ_FRAGMENT.replace("$tensor_head", f"{tensor}_head"),
        type=type_,
        name=name,
        dim=dim,
        index=index_type(spec),
        row=place(tensor, "row"),
        column=place(tensor, "column"),
    )


def zeros(name: str, count: int, *, declared: bool = True) -> str:
    """Return statements that make fragments of float zeros."""
    declaration = f"simdgroup_matrix<float, 8, 8> {name}[{count}];\n" if declared else ""
    return f"""\
{declaration}for (int d = 0; d < {count}; d++)
  {name}[d] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);"""


_ANY_OF_GROUP = """\
bool own = false;
$tests
const bool of_simdgroup = simd_any(own);
if (lane == 0)
  flags[sg] = of_simdgroup ? 1u : 0u;
threadgroup_barrier(mem_flags::mem_threadgroup);
bool odd = false;
for (int i = 0; i < $simdgroups; i++)
  odd = odd || flags[i] != 0u;"""


def any_nonfinite(fragments: dict[str, int], simdgroups: int) -> str:
    """Return statements that set ``odd``, the same in all threads: whether an element of some
    fragment isn't finite. ``flags`` is threadgroup memory of a uint a simdgroup.

    Args:
        fragments: names of arrays of fragments, with their sizes.
    """
    tests = "\n".join(
        f"""\
for (int d = 0; d < {count}; d++)
  own = own || !isfinite({name}[d].thread_elements()[0])
      || !isfinite({name}[d].thread_elements()[1]);"""
        for name, count in fragments.items()
    )
    return any_of_group(tests, simdgroups)


def any_of_group(tests: str, simdgroups: int) -> str:
    """Return statements that set ``odd``, the same in all threads: whether ``own`` is true in some
    thread. ``flags`` is threadgroup memory of a uint a simdgroup.

    Args:
        tests: statements that may set ``own``, which is false.
    """
    return fill(_ANY_OF_GROUP, tests=tests, simdgroups=simdgroups)


# Walks along runs


def row_of_blocks(spec: Spec) -> str:
    """Return statements that name the runs of row ``block`` of blocks: ``first_run`` and
    ``last_run``. Without a mask there is one run."""
    if spec.mask_kind == "none":
        return "const int first_run = 0;\nconst int last_run = 1;"
    return f"""\
const long runs_at = b * {place("mask_batch")} + h * {place("mask_head")} + block;
const int first_run = offsets[runs_at];
const int last_run = offsets[runs_at + 1];"""


def run_bounds(spec: Spec, block: int, first: str, end: str) -> str:
    """Return statements that name a run in elements, ``begin`` and ``end``, and ``full``.

    Args:
        block: elements of a block.
        first, end: text of the bounds that runs are cut at.
    """
    if spec.mask_kind == "none":
        return f"const int begin = {first};\nconst int end = {end};\nconst bool full = true;"
    return f"""\
const int begin = max(runs[3 * run] * {block}, {first});
const int end = min(runs[3 * run + 1] * {block}, {end});
const bool full = runs[3 * run + 2] == 1;"""
