"""The sources that run on Intel GPUs keep the rules of `kernel_rules`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_rules import violations

import anyflex
import anyflex_triton
import anyflex_xpu
from anyflex.testing import posing
from anyflex_triton.building import write_source
from anyflex_triton.dependent_launch import overlaps
from anyflex_xpu.backend import XpuBackend

FOLDERS = [Path(str(package.__file__)).parent for package in (anyflex_triton, anyflex_xpu)]
FILES = sorted(file for folder in FOLDERS for file in folder.rglob("*.py"))
# Excused violations, by file: descriptors made on the host for other targets (test_interpreter
# shows that Intel gets none), and launches that overlap
# (`test_launches_for_intel_do_not_overlap`).
ELSEWHERE = {
    "anyflex_triton/arguments.py": {
        "triton.tools.tensor_descriptor is not for every device",
        "a descriptor is made on the device, by the kernel that uses it",
    },
    "anyflex_triton/dependent_launch.py": {"inline assembly is one vendor's"},
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_source_keeps_the_rules(file: Path) -> None:
    allowed = ELSEWHERE.get(f"{file.parent.name}/{file.name}", set())
    found = violations(file.read_text(encoding="utf-8"))
    assert [each for each in found if each.rule not in allowed] == []


def test_launches_for_intel_do_not_overlap() -> None:
    """Overlap needs instructions that are NVIDIA's assembly."""
    assert not overlaps(XpuBackend("xpu", "xpu").target())


def test_what_is_written_for_mods_keeps_the_rules() -> None:
    """Cover functions that a vendor's library has too, and a captured tensor that learns."""
    slopes = torch.zeros(2, requires_grad=True)
    query = torch.zeros(1, 2, 32, 16, requires_grad=True)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        s = torch.tanh(s) + torch.exp2(s) + torch.log1p(s * s) + torch.erf(s) + torch.sin(s)
        return torch.where(q % 7 > k // 3, s.pow(2.5), torch.sqrt(s * s)) + slopes[h] * (k - q)

    mask = anyflex.create_block_mask(lambda b, h, q, k: (q >= k) | (k < 3), None, None, 32, 32)
    with posing("xpu"):
        found = anyflex.explain(query, query, query, score, mask, backend="xpu")
    source = write_source(found.selection.spec)
    assert "score_mod_backward" in source and "captured_gradients" in source
    assert violations(source) == []


KERNEL = """
import triton
import triton.language as tl

@triton.jit
def kernel(pointer, other, n):
{body}
"""
MADE = "d = tl.make_tensor_descriptor(pointer, [n, 64], [64, 1], [16, 64])"


def broken_by(*body: str) -> list[str]:
    source = KERNEL.format(body="\n".join(f"    {line}" for line in body))
    return [violation.rule for violation in violations(source)]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("p = tl.make_block_ptr(pointer, [n], [1], [0], [16], [0])", "block pointers are gone"),
        ("p = tl.advance(pointer, [16])", "block pointers are gone"),
        ("x = tl.inline_asm_elementwise('', '=r', [n], tl.int32, True, 1)", "inline assembly"),
        ("x = tl.extra.cuda.libdevice.tanh(n)", "extra.cuda is one vendor's"),
        ("x = tl.extra.hip.libdevice.tanh(n)", "extra.hip is one vendor's"),
        ("for i in tl.range(0, n, warp_specialize=True): pass", "warp specialisation"),
        ("kernel[(1,)](pointer, other, n, num_ctas=2)", "clusters"),
        ("kernel[(1,)](pointer, other, n, maxnreg=128)", "grf_mode instead"),
        ("x = tl.dot(pointer, other)", "names its input_precision"),
        ("x = pointer.load([0, 0])", "used in the function that makes it"),
        ("pointer.store([0, 0], n)", "used in the function that makes it"),
    ],
)
def test_a_banned_construct_is_found(line: str, rule: str) -> None:
    (found,) = broken_by(line)
    assert rule in found


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("from triton.language.extra.cuda import libdevice", "extra.cuda is one vendor's"),
        ("import triton.language.extra.hip.libdevice", "extra.hip is one vendor's"),
        ("from triton.language.extra import cuda", "extra.cuda is one vendor's"),
        ("from triton.tools.tensor_descriptor import TensorDescriptor", "not for every device"),
        ("from triton.experimental import gluon", "not for every device"),
        ("TABLE = {'tanh': 'tl.extra.cuda.libdevice.tanh({0})'}", "extra.cuda is one vendor's"),
        ("TABLE = {'exp': 'tl.inline_asm_elementwise({0})'}", "inline assembly"),
    ],
)
def test_a_banned_import_or_text_is_found(line: str, rule: str) -> None:
    (found,) = violations(line)
    assert rule in found.rule


@pytest.mark.parametrize(
    "use",
    [
        "x = inner(d, n)",
        "x = (d, n)",
        "return d",
        "inner(tl.make_tensor_descriptor(pointer, [n, 64], [64, 1], [16, 64]), n)",
    ],
)
def test_a_descriptor_that_leaves_its_function_is_found(use: str) -> None:
    rules = broken_by(MADE, "x = d.load([0, 0])", use)
    assert len(rules) == 1 and "descriptor" in rules[0]


INNER = """
@triton.jit{options}
def inner(tensor, DESCRIBED: tl.constexpr):
    if DESCRIBED is not None:
        return tensor.load([0, 0])
    else:
        return tl.load(tensor)
"""


def test_a_kernel_may_hand_its_descriptor_to_another_which_is_inlined() -> None:
    body = f"    {MADE}\n    x = inner(d, 'kernel')"
    assert not violations(KERNEL.format(body=body) + INNER.format(options=""))
    (found,) = violations(KERNEL.format(body=body) + INNER.format(options="(noinline=True)"))
    assert "inlined" in found.rule
    imported = "from anyflex_triton.tiles import inner\n"
    assert not violations(imported + KERNEL.format(body=body))
    assert violations(imported.replace("triton", "other") + KERNEL.format(body=body))


def test_a_kernel_may_hand_its_descriptor_to_another_in_a_record() -> None:
    body = f"    {MADE}\n    x = inner(Rows(tensor=d), 'kernel')"
    rows = "@record\nclass Rows:\n    tensor: Any\n"
    assert not violations(rows + KERNEL.format(body=body) + INNER.format(options=""))
    assert violations(KERNEL.format(body=body) + INNER.format(options=""))


def test_only_what_is_compiled_for_other_targets_may_use_descriptors_from_outside() -> None:
    outside = "    x = pointer.load([0, 0])"
    host = "DESCRIBED == 'host'"
    assert not broken_by(f"if {host}:", outside, "else:", "    x = tl.load(other)")
    assert not broken_by(f"x = pointer.load([0, 0]) if {host} else tl.load(other)")
    assert not broken_by("if DESCRIBED is not None:", outside)
    assert broken_by(f"if {host}:", outside, "else:", outside)
    assert broken_by("if DESCRIBED is not None:", "    pass", "else:", outside)
    assert broken_by("if DESCRIBED == 'kernel':", outside)
    assert broken_by(f"if not {host}:", outside)
    assert broken_by("if n:", outside)
    assert broken_by("if DESCRIBED is not None:", "    x = (n + 1).load([0, 0])")


def test_what_every_device_has_is_no_violation() -> None:
    assert not violations("from triton.language.extra import libdevice")
    assert not violations('"""Neither tl.make_block_ptr nor warp_specialize."""')
    assert not broken_by(
        MADE,
        "x = d.load([0, 0])",
        "y = tl.load(other + tl.arange(0, 16))",
        "d.store([0, 0], tl.dot(x, x.T, input_precision='ieee'))",
        "tl.atomic_add(other, y)",
        "tl.store(other, n)",
    )
