"""Building of a block mask's runs from an evaluator of its elements."""

from __future__ import annotations

import warnings

from anyflex.block_mask.dense_scan import chunked_runs
from anyflex.block_mask.elementwise_evaluation import Elements, TracedElements
from anyflex.block_mask.quad_tree import QuadTree
from anyflex.block_mask.undecided_blocks import Budget
from anyflex.errors import PerformanceWarning
from anyflex.intervals.evaluation import Domain
from anyflex.mask_structure.runs import RunList
from anyflex.process.user_frames import user_stacklevel

__all__ = ["built_runs"]


def built_runs(elements: Elements, domain: Domain, budget: Budget) -> RunList:
    """Return the runs of a domain, as `create_block_mask` decides them: blocks that the budget
    leaves undecided are PARTIAL, with one PerformanceWarning."""
    if isinstance(elements, TracedElements):
        tree = QuadTree(elements, domain, budget)
        runs = tree.build()
        undecided = tree.undecided_term()
    else:
        sizes = (domain.batch, domain.heads, domain.lengths, domain.block_size)
        runs = chunked_runs(elements, *sizes, budget)
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
