"""Backend in plain torch that takes packed sequences and pages as they are, one by one.

It stands on the example plugin's dense kernel: faults are made in copies of both.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Literal

import torch
from anyflex_example.backend import ExampleBackend
from torch import Tensor

from anyflex.plugin import Artifacts, Call, Kernel, Outputs, Spec, TensorSpec

__all__ = ["PackedBackend"]


class PackedKernel(Kernel):
    """Calls of a dense kernel, one for each sequence."""

    def __init__(self, dense: Kernel) -> None:
        self.dense = dense

    def describe(self, call: Call) -> str:
        return "sequence by sequence"

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        return ()

    @torch.no_grad()
    def forward(self, call: Call, out: Outputs) -> None:
        rows = call.packed
        assert rows is not None
        out.out.zero_()
        for each in (out.lse, out.max_scores):
            if each is not None:
                each.fill_(-torch.inf)
        block_row = 0
        for i, length in enumerate(rows.kv_lengths.tolist()):
            begin, end = rows.q_offsets[i : i + 2].tolist()
            one = copy.copy(call)
            one.packed = None
            one.query = call.query[:, :, begin:end]
            one.key, one.value = (
                self.keys(call, tensor, i, length) for tensor in (call.key, call.value)
            )
            slot, start = int(rows.slots[i]), int(rows.q_starts[i])
            object.__setattr__(one, "index_offsets", (slot, 0, start, 0))
            if call.mask is not None:
                blocks = -(-(end - begin) // call.mask.block_size[0])
                one.mask = dataclasses.replace(
                    call.mask,
                    offsets=call.mask.offsets[:, :, block_row : block_row + blocks + 1],
                    q_length=end - begin,
                    kv_length=length,
                )
                block_row += blocks
            lse, maxima = (
                None if each is None else each[:, :, begin:end]
                for each in (out.lse, out.max_scores)
            )
            self.dense.forward(one, Outputs(out.out[:, :, begin:end], lse, maxima))

    def keys(self, call: Call, memory: Tensor, i: int, length: int) -> Tensor:
        """Return the keys or values of a sequence, [1, Hkv, length, ...]."""
        rows = call.packed
        assert rows is not None
        if rows.page_table is None:
            assert rows.kv_offsets is not None
            begin = int(rows.kv_offsets[i])
            return memory[:, :, begin : begin + length]
        table, page = rows.page_table, memory.shape[2]
        table_row = i if rows.table_rows is None else int(rows.table_rows[i])
        position = torch.arange(length)
        ids = table[table_row, position // page].long()
        return memory[ids, :, position % page].transpose(0, 1)[None]


class PackedBackend(ExampleBackend):
    """The example plugin's backend, which takes other layouts too."""

    capabilities = dataclasses.replace(
        ExampleBackend.capabilities,
        known_fields=ExampleBackend.capabilities.known_fields
        | {"q_layout", "kv_layout", "page_size", "batch_invariant"},
    )

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        dense = super().compile(spec, artifacts)
        return dense if spec.q_layout == "dense" else PackedKernel(dense)
