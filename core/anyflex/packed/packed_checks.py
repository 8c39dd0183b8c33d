"""Checks of a batch's tensors and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anyflex.runtime.kernel_cache import is_capturing
from anyflex.tensors.dynamo_disabled import in_graph
from anyflex.tensors.dynamo_errors import fail

__all__ = ["bound_of", "check_count", "check_slots", "check_tensors", "check_values"]


def check_count(what: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        fail("ArgumentTypeError", f"{what} must be an int, got {type(value).__name__}.")
    if value < 0:
        fail("ArgumentError", f"{what} must be at least 0, got {value}.")


_FORMS = {
    "q_offsets": "[N + 1]",
    "kv_lengths": "[N]",
    "kv_offsets": "[N + 1]",
    "page_table": "[R, W]",
    "slots": "[N]",
    "q_starts": "[N]",
}


def check_tensors(given: dict[str, Any]) -> None:
    """Check types, dtypes, devices and shapes of the tensors that are given."""
    device: torch.device | None = None
    length: int | None = None
    for name, tensor in given.items():
        if tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            fail(
                "ArgumentTypeError",
                f"Packed: {name} must be an int32 tensor {_FORMS[name]}, got "
                f"{type(tensor).__name__}.",
            )
        if tensor.dtype is not torch.int32:
            fail(
                "ArgumentTypeError",
                f"Packed: {name} must be int32, got {tensor.dtype}: use .to(torch.int32).",
            )
        device = tensor.device if device is None else device
        if tensor.device != device:
            fail(
                "ArgumentError",
                f"Packed: all tensors must be on one device, got {name} on {tensor.device} and "
                f"others on {device}.",
            )
        extra = int(name.endswith("offsets"))
        dims = 2 if name == "page_table" else 1
        if tensor.dim() == dims == 1:
            length = tensor.shape[0] - extra if length is None else length
        fits = tensor.dim() == dims and (dims == 2 or tensor.shape[0] - extra == length)
        if not fits or (extra and tensor.shape[0] == 0):
            wanted = _FORMS[name] + (f" with N = {length}" if length is not None else "")
            fail(
                "ArgumentError",
                f"Packed: {name} must have shape {wanted}, got {list(tensor.shape)}.",
            )


def check_slots(
    what: str,
    slots: Sequence[int],
    page_table: Tensor | None,
    used: Sequence[int] | None = None,
) -> None:
    """Check slots against each other and the page table.

    Args:
        used: slots that must differ; None is all of them.
    """
    used = slots if used is None else used
    if len(set(used)) != len(used):
        twice = next(slot for slot in used if list(used).count(slot) > 1)
        fail("ArgumentError", f"{what}: slots must differ, got {twice} twice.")
    if not slots:
        return
    low, high = min(slots), max(slots)
    if low < 0:
        fail("ArgumentError", f"{what}: slots must be at least 0, got {low}.")
    if page_table is not None and high >= page_table.shape[0]:
        fail(
            "ArgumentError",
            f"{what}: page_table must have a row for each slot, got {page_table.shape[0]} rows "
            f"and slot {high}.",
        )


def check_values(
    q_offsets: Tensor,
    kv_offsets: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    slots: Tensor | None,
) -> None:
    """Check numbers that the host can read without waiting for a device."""
    for name, offsets in (("q_offsets", q_offsets), ("kv_offsets", kv_offsets)):
        if int(offsets[0]) != 0 or bool((offsets.diff() < 0).any()):
            fail(
                "ArgumentError",
                f"Packed: {name} must start with 0 and not fall, got {_shown(offsets)}.",
            )
    sequences = lengths.shape[0]
    if bool((lengths < 0).any()):
        fail("ArgumentError", f"Packed: kv_lengths must be at least 0, got {_shown(lengths)}.")
    if page_table is None:
        if bool((lengths > kv_offsets.diff()).any()):
            fail(
                "ArgumentError",
                "Packed: kv_lengths must not exceed the rows that kv_offsets gives each sequence, "
                f"got {_shown(lengths)} for {_shown(kv_offsets.diff())}.",
            )
    elif slots is None and sequences > page_table.shape[0]:
        fail(
            "ArgumentError",
            "Packed: page_table must have a row for each sequence, got "
            f"{page_table.shape[0]} rows for {sequences}.",
        )
    if slots is not None:
        # A batch with room for more sequences leaves any slot to those that have nothing.
        used = (q_offsets.diff() > 0) | (lengths > 0)
        check_slots("Packed", slots.tolist(), page_table, slots[used].tolist())


def _shown(tensor: Tensor) -> str:
    numbers = tensor.tolist()
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:8]))}, ...]"


def bound_of(name: str, given: Any, lengths: Tensor) -> int:
    """Return the host's bound of lengths, read from them where none is given."""
    if given is None:
        if in_graph() or lengths.device.type == "meta":
            fail(
                "ArgumentError",
                f"Packed: {name} must be given where the lengths can't be read: inside of "
                "torch.compile and torch.export, and on device meta.",
            )
        if is_capturing(lengths.device.type):
            fail(
                "GraphCaptureError",
                f"Packed: {name} is None while a device graph is being captured, and reading it "
                "would wait for the device: pass a bound.",
            )
        return int(lengths.max()) if lengths.numel() else 0
    check_count(f"Packed: {name}", given)
    if lengths.device.type == "cpu" and not in_graph() and lengths.numel():
        longest = int(lengths.max())
        if longest > given:
            fail("ArgumentError", f"Packed: {name} = {given}, and a sequence has {longest}.")
    return int(given)
