"""Texts of kernels in a folder, for Apple's compiler on a Mac.

They are the kernels of `SPECS`: each kind of kernel for each dtype and for several head dims, and
each operation of mods in each type that it takes. Those of the option ``mpp`` are written in Metal
4 and have a folder of their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from anyflex.plugin import (
    DTYPES,
    OPERATIONS,
    CapturedFacts,
    ModGraph,
    Node,
    Spec,
    operand_classes,
    parse_graph,
    type_class,
)
from anyflex_mps.forward_matmul import products_of
from anyflex_mps.inventory import shaders_of
from anyflex_mps.matmul_test import matmul_test_shader
from anyflex_mps.options import wants_mpp
from anyflex_mps.self_test import self_test_shader
from anyflex_mps.tensor_text import INCLUDES
from anyflex_mps.text import TYPES

__all__ = ["COMMANDS", "METAL_4", "SPECS", "dump_shaders", "texts_of"]

METAL_4 = "metal4"
"""Folder of kernels that need Metal 4."""
COMMANDS = {
    "": "xcrun -sdk macosx metal -std=metal3.1 -fsyntax-only",
    METAL_4: "xcrun -sdk macosx metal -std=metal4.0 -mmacosx-version-min=26.2 -fsyntax-only",
}
"""Command lines of Apple's compiler, without the file, by the folder that they are for."""

_DIMS = ((64, 64), (128, 128), (256, 256), (80, 48))
"""Head dims of query and value; the last are neither equal nor multiples of 32."""

_CAUSAL = parse_graph("input i64 - q_idx;input i64 - kv_idx;ge bool 0,1 -;=2")
_TABLES = parse_graph(
    "input f32 - score;input i64 - h;load f32 1 0;input i64 - q_idx;input i64 - kv_idx;"
    "sub i64 4,3 -;cast f32 5 -;mul f32 2,6 -;add f32 0,7 -;load f32 3,5 1;add f32 8,9 -;"
    "number f32 - f0;truediv f32 10,11 -;tanh f32 12 -;mul f32 13,11 -;=14"
)
"""Score mod: a slope of each head, a bias of each row and distance, and a soft cap."""
_LEARNED = (CapturedFacts(torch.float32, 1, True), CapturedFacts(torch.float32, 2, True))


def _calls() -> dict[str, Spec]:
    """Return specs by name, whose dtype and head dims are to be replaced."""
    plain = Spec("mps", "apple9", torch.float32, 64, 64, needs_lse=True, gradients=("q", "k", "v"))
    masked = replace(
        plain, mask_kind="runs", mask_graph=_CAUSAL, block_size=(128, 128), gqa_ratio=4
    )
    learned = replace(plain, score_graph=_TABLES, captured=_LEARNED)
    packed = replace(
        masked,
        block_size=(128, 128),
        aux=("lse", "max_scores"),
        gradients=(),
        sinks=True,
        q_layout="packed",
        kv_layout="packed",
    )
    return {
        "plain": replace(plain, aux=("lse", "max_scores"), dlse=True),
        "masked": masked,
        "short": replace(masked, q_class="short", aux=("lse", "max_scores"), gradients=()),
        "wide": replace(
            masked,
            mask_graph=None,
            kv_broadcast=True,
            block_size=(20, 56),
            index_width=64,
            alignment=("scattered", "scattered", "scattered"),
            score_graph=_TABLES,
            captured=tuple(replace(facts, needs_grad=False) for facts in _LEARNED),
        ),
        "learned": learned,
        "repeatable": replace(learned, determinism="on"),
        "packed": packed,
        "paged": replace(packed, q_class="one", kv_layout="paged", page_size=16),
    }


def _operations(name: str) -> Spec:
    """Return a spec whose score mod adds up every operation that takes a type."""
    dtype = DTYPES[name]
    nodes = [Node("input", torch.float32, (), "score"), Node("input", torch.int64, (), "kv_idx")]
    nodes += [Node("load", dtype, (1,), 0), Node("load", dtype, (1,), 1)]
    nodes.append(Node("lt", torch.bool, (2, 3)))
    results = [len(nodes)]
    nodes.append(Node("const", dtype, (), True if dtype is torch.bool else 3))
    if type_class(dtype) == "int":
        # Reads at a value of the type, and at a place that only int64 holds.
        nodes.append(Node("const", torch.int64, (), 2**31 - 1))
        nodes.append(Node("mul", torch.int64, (1, len(nodes) - 1)))
        results += [len(nodes), len(nodes) + 1]
        nodes += [Node("load", dtype, (at,), 0) for at in (2, len(nodes) - 1)]
    for operation, count in OPERATIONS.items():
        if count and operation != "cast" and type_class(dtype) in operand_classes(operation):
            compares = operation in ("eq", "ne", "lt", "le", "gt", "ge")
            arguments = (4, 2, 3) if count == 3 else (2, 3)[:count]
            results.append(len(nodes))
            nodes.append(Node(operation, torch.bool if compares else dtype, arguments))
    for other in _HELD.values():
        results.append(len(nodes))
        nodes.append(Node("cast", other, (2,)))
    total = 0
    for result in results:
        if nodes[result].dtype is not torch.float32:
            nodes.append(Node("cast", torch.float32, (result,)))
            result = len(nodes) - 1
        nodes.append(Node("add", torch.float32, (total, result)))
        total = len(nodes) - 1
    learns = dtype.is_floating_point
    return Spec(
        "mps",
        "apple9",
        torch.float32,
        64,
        64,
        score_graph=ModGraph(tuple(nodes), total),
        captured=(CapturedFacts(dtype, 1, learns),) * 2,
        needs_lse=True,
        gradients=("q", "k", "v"),
    )


_HELD = {name: dtype for name, dtype in DTYPES.items() if dtype is not torch.float64}


def _specs() -> Iterator[tuple[str, Spec]]:
    for (call, spec), dtype, (e, ev) in itertools.product(_calls().items(), TYPES, _DIMS):
        made = replace(spec, dtype=dtype, head_dim=e, value_head_dim=ev)
        precision = "highest" if dtype is torch.float32 else ""
        yield f"{call}-{TYPES[dtype]}-{e}x{ev}", replace(made, fp32_precision=precision)
    for name in _HELD:
        yield f"operations-{name}", _operations(name)
    for (call, spec), dtype, (e, ev) in itertools.product(_calls().items(), TYPES, _DIMS):
        if call in ("masked", "wide") and dtype is not torch.float32:
            units = replace(spec, arch="apple10", options=(("mpp", True),))
            made = replace(units, dtype=dtype, head_dim=e, value_head_dim=ev)
            yield f"mpp-{call}-{TYPES[dtype]}-{e}x{ev}", made


SPECS: Mapping[str, Spec] = dict(_specs())
"""Specs whose kernels are written, by name."""


def texts_of(specs: Mapping[str, Spec]) -> dict[str, str]:
    """Return the texts of self tests and of the specs' kernels, each once, by file name."""
    named = []
    for dtype, type_ in TYPES.items():
        named.append((f"self_test-{type_}.metal", self_test_shader(dtype).text))
    for name, spec in specs.items():
        if wants_mpp(spec):
            text = matmul_test_shader(spec.dtype, products_of(spec)).text
            named.append((f"{METAL_4}/{name}-self_test.metal", text))
        for number, shader in enumerate(shaders_of(spec)):
            folder = f"{METAL_4}/" if INCLUDES in shader.text else ""
            named.append((f"{folder}{name}-{number}-{shader.name}.metal", shader.text))
    firsts = {text: name for name, text in reversed(named)}
    return {name: text for name, text in named if firsts[text] == name}


def dump_shaders(folder: Path) -> int:
    """Write the texts of `SPECS` to a folder, which is made, and return their number.

    Raises:
        FileExistsError: the folder holds something.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} isn't empty; name a new folder")
    texts = texts_of(SPECS)
    (folder / METAL_4).mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="ascii")
    return len(texts)
