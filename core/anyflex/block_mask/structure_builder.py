"""Building of a block mask's runs from an evaluator of its elements."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from anyflex.block_mask.dense_scan import chunked_runs
from anyflex.block_mask.elementwise_evaluation import Elements, TracedElements
from anyflex.block_mask.mask_function import captured_name
from anyflex.block_mask.quad_tree import QuadTree
from anyflex.block_mask.undecided_blocks import DEFAULT_BUDGET, Budget
from anyflex.errors import BlockMaskError, PerformanceWarning
from anyflex.intervals.evaluation import Domain
from anyflex.mask_structure.runs import RunList
from anyflex.process.user_frames import user_stacklevel
from anyflex.tensors.storage_checks import why_unreadable
from anyflex.tracing.trace import TracedMod

__all__ = ["built_runs", "captured_device"]


def built_runs(elements: Elements, domain: Domain, exact: bool) -> RunList:
    """Return the runs of a domain, as `create_block_mask` decides them: blocks that the budget
    leaves undecided are PARTIAL, with one PerformanceWarning."""
    budget = Budget(None if exact else DEFAULT_BUDGET)
    if isinstance(elements, TracedElements):
        tree = QuadTree(elements, domain, budget)
        runs = tree.build()
        undecided = tree.undecided_term()
    else:
        runs = chunked_runs(elements, domain, budget)
        undecided = "the whole function, which can't be traced"
    if budget.exceeded:
        warnings.warn(
            f"create_block_mask stopped after work worth {budget.spent} elements and left the "
            f"rest PARTIAL, which is right but may be slower. What ranges can't decide there is "
            f"{undecided}. Pass exact=True to look at everything, or build the mask from runs.",
            PerformanceWarning,
            stacklevel=user_stacklevel(),
        )
    return runs


def captured_device(traced: TracedMod | None) -> torch.device:
    """Return where a mask mod's captured tensors are, the CPU without any. Raises BlockMaskError
    where one has no values to build a mask from."""
    if type(torch.empty(0, device="cpu")) is not Tensor:
        raise BlockMaskError(
            "a mask is built from values, and under FakeTensorMode tensors have none: build it "
            "outside of the mode"
        )
    if traced is not None:
        for position, tensor in enumerate(traced.captured):
            if getattr(tensor, "fake_mode", None) is not None:
                reason = "is a fake tensor and has no values: a mask is built from values"
            elif tensor.device.type == "meta":
                reason = "is on device meta and has no values: a mask is built from values"
            else:
                reason = why_unreadable(tensor)
            if reason:
                raise BlockMaskError(
                    f"mask_mod reads {captured_name(traced, position)}, which {reason}"
                )
            if tensor.device.type != "cpu":
                return tensor.device
    return torch.device("cpu")
