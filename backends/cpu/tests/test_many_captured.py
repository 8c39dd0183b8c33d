"""Mods that read hundreds of tensors: LLVM compiles them up to a limit, and the message past it
names the cure."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from soak import SOAK
from torch import Tensor

import anyflex

pytest.importorskip("llvmlite", reason="mods are compiled by llvmlite, the extra `jit`")

from anyflex_cpu import jit_engine, programs
from anyflex_cpu.backend import MOST_CAPTURED
from anyflex_cpu.llvm_text import PIECE, Function, Module

LENGTH = 40


def adding(tables: list[Tensor], dims: int) -> Callable[..., Any]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        for table in tables:
            score = score + (table[k] if dims == 1 else table[q, k])
        return score

    return score_mod


def drawn(count: int, dims: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn((LENGTH,) * dims, generator=generator) / count for _ in range(count)]


def blocks_of(text: str) -> list[int]:
    """Lengths of the blocks of all functions."""
    return [part.count("\n") for part in re.split(r"(?m)^[\w.]+:\n|^define .*\n", text)]


@pytest.mark.parametrize("dims", [1, 2])
def test_the_code_grows_with_the_tensors_and_its_blocks_do_not(
    dims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = torch.randn(1, 1, LENGTH, 8, requires_grad=True)
    texts: list[str] = []

    class Seen(Exception):
        pass

    def noted(text: str, target: object) -> bytes:
        texts.append(text)
        raise Seen

    monkeypatch.setattr(jit_engine, "assemble", noted)
    for count in (50, 100, 200):
        tables = drawn(count, dims)
        with pytest.raises(anyflex.PluginError) as caught:
            anyflex.flex_attention(query, query, query, adding(tables, dims), backend="cpu")
        assert isinstance(caught.value.__cause__, Seen)
    once, twice, fourfold = map(len, texts)
    assert fourfold - twice < 2.2 * (twice - once)
    assert max(blocks_of(texts[-1])) <= PIECE + 4


@pytest.mark.parametrize("dims", [2, *[1] * SOAK])
def test_results_and_gradients_of_code_in_pieces_are_the_interpreters(dims: int) -> None:
    def results(mods: str) -> list[Tensor]:
        query = torch.linspace(-1, 1, LENGTH * 8).view(1, 1, LENGTH, 8).requires_grad_()
        tables = [table.requires_grad_() for table in drawn(60, dims)]
        out = anyflex.flex_attention(
            query,
            query,
            query,
            adding(tables, dims),
            backend="cpu",
            kernel_options={"cpu": {"mods": mods}},
        )
        return [out, *torch.autograd.grad(out.square().sum(), [query, *tables])]

    for found, wanted in zip(results("jit"), results("interpreter"), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_an_index_outside_is_found_in_code_in_pieces() -> None:
    tables = drawn(120, 1)
    tables[70] = tables[70][:-1]
    query = torch.randn(1, 1, LENGTH, 8)
    with pytest.raises(anyflex.ModIndexError, match="captured tensor 70"):
        anyflex.flex_attention(
            query,
            query,
            query,
            adding(tables, 1),
            backend="cpu",
            kernel_options={"cpu": {"mods": "jit"}},
        )


def test_longer_code_than_llvm_should_get_is_interpreted_and_explain_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(programs, "LONGEST", 50_000)
    query = torch.randn(1, 1, LENGTH, 8)
    few, many = adding(drawn(3, 1), 1), adding(drawn(30, 1), 1)
    said = anyflex.explain(query, query, query, few, backend="cpu").variant
    assert said.endswith("mods jit")
    said = anyflex.explain(query, query, query, many, backend="cpu").variant
    assert re.search(
        r"mods interpreted \(they are 0\.1 MB of LLVM IR, and more than 0\.05 MB", said
    )
    out = anyflex.flex_attention(query, query, query, many, backend="cpu")
    wanted = anyflex.flex_attention(query, query, query, many, backend="reference")
    torch.testing.assert_close(out, wanted)
    forced = {"cpu": {"mods": "jit"}}
    said = anyflex.explain(query, query, query, many, backend="cpu", kernel_options=forced).variant
    assert said.endswith("mods jit")


def test_a_block_in_pieces_keeps_its_stack_first_and_tells_where_its_successors_come_from() -> (
    None
):
    module = Module(frozenset(), "nounwind")
    function = Function(module, "f", "define void @f(ptr %program, ptr %tile)")
    entry, loop = function.block("entry"), function.block("loop")
    entry.lines = [f"%a{i} = add i64 0, {i}" for i in range(PIECE + 1)] + ["%s = alloca i32"]
    entry.end = f"br label %{loop.label}"
    loop.phis.append(f"%i = phi i64 [0, %{entry.label}], [1, %{loop.label}]")
    loop.end = f"br label %{loop.label}"
    function.finish()
    text = module.functions["f"]
    assert text.splitlines()[2] == "%s = alloca i32"
    assert "phi i64 [0, %entry.0.1], [1, %loop.1]" in text
    assert text.count("label %never") == 1 and "\nnever:\nret void\n}" in text
    jit_engine.assemble(str(module), jit_engine.host_target())


def test_gradients_of_more_tensors_than_the_library_takes_are_refused_with_the_number() -> None:
    query = torch.randn(1, 1, LENGTH, 8)
    tables = drawn(MOST_CAPTURED, 1)
    tables[3].requires_grad_()
    anyflex.flex_attention(query, query, query, adding(tables, 1), backend="cpu").sum().backward()
    assert tables[3].grad is not None
    one_more = adding([*tables, torch.zeros(LENGTH)], 1)
    with pytest.raises(anyflex.BackendRefused, match="at most 64 tensors; these read 65, 1 of"):
        anyflex.flex_attention(query, query, query, one_more, backend="cpu")
    with torch.no_grad():
        anyflex.flex_attention(query, query, query, one_more, backend="cpu")
