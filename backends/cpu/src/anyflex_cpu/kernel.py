"""Compiled specs: hands each call to the native library, and raises what it reports."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from anyflex.plugin import (
    Call,
    GradInputs,
    Grads,
    Kernel,
    ModIndexError,
    Outputs,
    Saved,
    Spec,
    TensorSpec,
)
from anyflex_cpu import structs
from anyflex_cpu.arguments import Arguments, Block, packed_values, storage_values, tensor_values
from anyflex_cpu.library import Library
from anyflex_cpu.programs import Programs

__all__ = ["CpuKernel", "PackedKernel"]

_pack_forward = structs.FORWARD.packer.pack_into
_pack_backward = structs.BACKWARD.packer.pack_into
_FORWARD_AT = structs.FORWARD.offset
_BACKWARD_AT = structs.BACKWARD.offset
_READ_OUTSIDE, _TOO_SMALL, _NO_MEMORY = 1, 2, 4
"""Values of af_status; a call returns no other but AF_OK and what no spec of ours leads to."""

_UNWANTED = (0, 0, 0, 0, 0)
_SIZES_KEPT = 1024
_ALIGNMENT = 64
"""Alignment of the workspace in bytes. torch's own memory has it, but the contract doesn't promise
it."""


_pack_packed = structs.PACKED.packer.pack_into
_PACKED_AT = structs.PACKED.offset
_pack_storage = structs.STORAGE.packer.pack_into
_STORAGE_AT = structs.STORAGE.offset


class CpuKernel(Kernel):
    """Holds everything that a spec fixes. Each running call has a block of memory of its own.

    Args:
        spec: what `CpuBackend.supports` accepted.
        library: the loaded native library.
        programs: the spec's mods.
    """

    def __init__(self, spec: Spec, library: Library, programs: Programs) -> None:
        self.spec = spec
        self.library = library
        self.programs = programs
        self.arguments = Arguments(spec, programs)
        self._learned = tuple(i for i, facts in enumerate(spec.captured) if facts.needs_grad)
        # append and pop of a deque are atomic: no lock is needed.
        self._blocks: deque[Block] = deque()
        self._sizes: dict[object, tuple[TensorSpec, ...]] = {}

    def describe(self, call: Call) -> str:
        block = self._block()
        self.arguments.write_problem(call, torch.get_num_threads(), block)
        variant = self.library.variant(block.address)
        self._blocks.append(block)
        mods = f", mods {self.programs.how}" if self.programs.how else ""
        if self.programs.reason:
            mods += f" ({self.programs.reason})"
        return f"{variant} {self.library.level}{mods}"

    def saved_outputs(self, call: Call) -> tuple[TensorSpec, ...]:
        """out before it is rounded: backward's delta needs those digits."""
        if self.spec.dtype is torch.float32:
            return ()
        shape = (*call.query.shape[:3], self.spec.value_head_dim)
        return (TensorSpec(shape, torch.float32),)

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        """One tensor of bytes, whose size follows from shapes and threads."""
        threads = torch.get_num_threads()
        learned = self._learned_elements(call) if self._learned else (0, 0)
        key = (direction, call.query.shape, call.key.shape, threads, learned, self.library.level)
        found = self._sizes.get(key)
        if found is None:
            if len(self._sizes) >= _SIZES_KEPT:
                self._sizes.clear()
            size = self._workspace_bytes(call, direction, threads, learned)
            found = self._sizes[key] = (TensorSpec((size + _ALIGNMENT,), torch.uint8),)
        return found

    def _learned_elements(self, call: Call) -> tuple[int, int]:
        """Elements of the captured tensors that get a gradient: of all, and of owned ones."""
        owned = self.programs.owned.tensors
        sizes = [call.captured[i].numel() for i in self._learned]
        return sum(sizes), sum(
            [size for i, size in zip(self._learned, sizes, strict=True) if i in owned]
        )

    def _workspace_bytes(
        self, call: Call, direction: str, threads: int, learned: tuple[int, int]
    ) -> int:
        block = self._block()
        self.arguments.write_problem(call, threads, block)
        if direction == "forward":
            size = self.library.forward_workspace(block.address)
        else:
            size = self.library.backward_workspace(block.address, *learned)
        self._blocks.append(block)
        return size

    def forward(self, call: Call, out: Outputs) -> None:
        """Fill `out`.

        Raises:
            ModIndexError: a live pair reads outside of a captured tensor.
        """
        try:
            block = self._blocks.pop()
        except IndexError:
            block = Block(self.arguments)
        threads = torch.get_num_threads()
        lse, max_scores = out.lse, out.max_scores
        (workspace,) = out.workspace
        self.arguments.write_problem(call, threads, block)
        while True:
            begin = workspace.data_ptr()
            address = (begin + _ALIGNMENT - 1) & -_ALIGNMENT
            _pack_forward(
                block.memory,
                _FORWARD_AT,
                out.out.data_ptr(),
                *out.out.stride(),
                0 if lse is None else lse.data_ptr(),
                0 if max_scores is None else max_scores.data_ptr(),
                out.saved[0].data_ptr() if out.saved else 0,
                address,
                begin + workspace.numel() - address,
            )
            status = self._run(block, call)
            if status != _TOO_SMALL:
                break
            workspace = self._larger(workspace, call, "forward", threads)
        if status:
            _raise(status, block.error, call)
        self._blocks.append(block)

    def _run(self, block: Block, call: Call) -> int:
        """Run forward with what `block` holds."""
        return self.library.forward(block.address, block.error_address)

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        """Fill `grads`."""
        block = self._block()
        threads = torch.get_num_threads()
        # These names keep copies alive until the call ends.
        lse = saved.lse.contiguous()
        dlse, delta = _rows(grad.dlse), _rows(grad.delta)
        learned = len(call.captured) if self._learned else 0
        if learned:
            self.arguments.write_gradients(grads.captured, block)
        (workspace,) = grads.workspace
        keys = self.arguments.keys
        self.arguments.write_problem(call, threads, block, backward=True)
        while True:
            _pack_backward(
                block.memory,
                _BACKWARD_AT,
                *tensor_values(saved.out),
                saved.extras[0].data_ptr() if saved.extras else 0,
                lse.data_ptr(),
                *tensor_values(grad.dout),
                0 if dlse is None else dlse.data_ptr(),
                0 if delta is None else delta.data_ptr(),
                *_target(grads.dq, tensor_values),
                *_target(grads.dk, keys),
                *_target(grads.dv, keys),
                *(block.grads if learned else (0, 0, 0)),
                learned,
                *_aligned(workspace),
            )
            status = self.library.backward(block.address, block.error_address)
            if status != _TOO_SMALL:
                break
            workspace = self._larger(workspace, call, "backward", threads)
        if status:
            _raise(status, block.error, call)
        self._blocks.append(block)

    def _block(self) -> Block:
        try:
            return self._blocks.pop()
        except IndexError:
            return Block(self.arguments)

    def _larger(self, workspace: Tensor, call: Call, direction: str, threads: int) -> Tensor:
        """A larger workspace, for when the number of threads, or the level, has changed since core
        asked for the size."""
        learned = self._learned_elements(call)
        size = self._workspace_bytes(call, direction, threads, learned)
        if size + _ALIGNMENT <= workspace.numel():
            raise RuntimeError(
                f"the native library asks for a workspace of {size} bytes and finds "
                f"{workspace.numel()} too few"
            )
        return torch.empty(size + _ALIGNMENT, dtype=torch.uint8, device="cpu")


class PackedKernel(CpuKernel):
    """A spec of packed sequences. Calls of one step come one after the other: what follows from
    its sequences alone is kept for the next one."""

    def __init__(self, spec: Spec, library: Library, programs: Programs) -> None:
        super().__init__(spec, library, programs)
        # In one field, because another thread may be calling.
        self._last: tuple[tuple[object, ...], tuple[TensorSpec, ...]] = ((None,), ())

    def describe(self, call: Call) -> str:
        pages = f" in pages of {self.spec.page_size}" if self.spec.page_size else ""
        return f"packed{pages} {super().describe(call).partition(' ')[2]}"

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        """One tensor of bytes, whose size follows from the sequences' lengths too."""
        threads = torch.get_num_threads()
        key = (call.packed, call.query.shape, call.key.shape, threads, self.library.level)
        last, sizes = self._last
        if last[0] is not key[0] or last[1:] != key[1:]:
            size = self._workspace_bytes(call, direction, threads, (0, 0))
            sizes = (TensorSpec((size + _ALIGNMENT,), torch.uint8),)
            self._last = key, sizes
        return sizes

    def _workspace_bytes(
        self, call: Call, direction: str, threads: int, learned: tuple[int, int]
    ) -> int:
        block = self._block()
        self.arguments.write_problem(call, threads, block)
        self._write(block, call)
        size = self.library.packed_workspace(block.address)
        self._blocks.append(block)
        return size

    def _write(self, block: Block, call: Call) -> None:
        """Write what a dense call doesn't have."""
        _pack_packed(block.memory, _PACKED_AT, *packed_values(call))
        storage = self.spec.kv_storage
        if storage != "plain":
            _pack_storage(block.memory, _STORAGE_AT, *storage_values(call, storage))

    def _run(self, block: Block, call: Call) -> int:
        self._write(block, call)
        return self.library.packed_forward(block.address, block.error_address)


def _raise(status: int, error: structs.Error, call: Call) -> None:
    """Raise what a status other than AF_OK means."""
    if status == _NO_MEMORY:
        raise MemoryError("no memory to find which index is outside of its captured tensor")
    if status != _READ_OUTSIDE:
        raise RuntimeError(f"the native library returned status {status}")
    shape = list(call.captured[error.captured].shape)
    mod = ("score_mod", "mask_mod")[error.mod]
    raise ModIndexError(
        f"{mod} reads captured tensor {error.captured}, shape {shape}, outside of it: index "
        f"{error.index} of dimension {error.dim} at a live pair",
        operation="captured[...]",
        hint="An index lies in -N..N-1: clamp it, or mask these pairs.",
    )


def _rows(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _aligned(workspace: Tensor) -> tuple[int, int]:
    """Address and size of the part of the tensor from the first multiple of the alignment on."""
    begin = workspace.data_ptr()
    address = (begin + _ALIGNMENT - 1) & -_ALIGNMENT
    return address, begin + workspace.numel() - address


def _target(tensor: Tensor | None, values: Callable[[Tensor], tuple[int, ...]]) -> tuple[int, ...]:
    return _UNWANTED if tensor is None else values(tensor)
