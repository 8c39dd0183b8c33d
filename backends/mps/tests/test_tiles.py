"""Tiles of every head dim fit, and take the memory that is computed."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch
from emulator import compile_shader

from anyflex.plugin import Spec
from anyflex_mps.decode import decode_shader
from anyflex_mps.forward import forward_shader
from anyflex_mps.forward_matmul import forward_matmul_shader, threadgroup_bytes
from anyflex_mps.keys import keys_shader
from anyflex_mps.queries import queries_shader
from anyflex_mps.text import Shader
from anyflex_mps.tiles import BYTES, REGISTERS, KernelName, tile_for

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
DIMS = (1, 7, 8, 16, 40, 64, 72, 96, 128, 129, 192, 256)


def spec_of(dtype: torch.dtype, dims: tuple[int, int]) -> Spec:
    gradients = ("q", "k", "v")
    return Spec("mps", "apple9", dtype, *dims, needs_lse=True, gradients=gradients)


@pytest.mark.parametrize("kernel", get_args(KernelName))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tile_of_any_head_dims_fits(dtype: torch.dtype, kernel: KernelName) -> None:
    for dims in itertools.product(DIMS, DIMS):
        for rows in (1, 9, 64) if kernel == "decode" else (None,):
            tile = tile_for(kernel, spec_of(dtype, dims), rows)
            assert tile.threadgroup_bytes + 4 * tile.simdgroups <= BYTES, dims
            assert tile.registers <= REGISTERS, dims
            assert tile.parts == 1 or kernel == "keys"
            assert tile.stages_rows or kernel != "decode"


def written(kernel: KernelName, spec: Spec) -> Shader:
    if kernel == "decode":
        return decode_shader(spec, tile_for("decode", spec, 8), 1)
    if kernel == "queries":
        return queries_shader(spec, None, True)
    return {"forward": forward_shader, "keys": keys_shader}[kernel](spec)


@pytest.mark.parametrize("kernel", get_args(KernelName))
@pytest.mark.parametrize("dims", [(16, 16), (128, 64), (256, 256)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_kernel_takes_the_memory_of_its_tile(
    dtype: torch.dtype, dims: tuple[int, int], kernel: KernelName
) -> None:
    spec = spec_of(dtype, dims)
    tile = tile_for(kernel, spec, 8 if kernel == "decode" else None)
    shader = written(kernel, spec)
    library = compile_shader(shader.text)
    taken = getattr(library, shader.name).static_thread_group_memory_length
    # Each array, and the flags, begin at a multiple of 16 bytes.
    wanted = tile.threadgroup_bytes + 4 * tile.simdgroups
    assert wanted <= taken < wanted + 16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_tile_on_matrix_units_fits_and_takes_what_is_computed(dtype: torch.dtype) -> None:
    for dims in itertools.product(DIMS, DIMS):
        assert threadgroup_bytes(Spec("mps", "apple10", dtype, *dims)) <= BYTES, dims
    for dims in ((64, 64), (20, 129), (256, 256)):
        spec = Spec("mps", "apple10", dtype, *dims)
        shader = forward_matmul_shader(spec)
        kernel = getattr(compile_shader(shader.text), shader.name)
        assert kernel.static_thread_group_memory_length == threadgroup_bytes(spec)
