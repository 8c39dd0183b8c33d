"""Cells: boxes of elements that are judged together."""

from __future__ import annotations

from dataclasses import dataclass

from anyflex.mod_graph.operations.bounds import End

__all__ = ["Cells"]


@dataclass(frozen=True, slots=True)
class Cells:
    """Boxes of whole blocks, or parts of one block each; int64 [n] tensors, or ints for all n.

    Args:
        count: n.
        b, h: the batch entry and head.
        q_low, q_high, kv_low, kv_high: elements, both ends included, inside the lengths.
        q_unit, kv_unit: rows and columns of the smallest block inside the cell.
        whole: each cell begins where a block does and ends where one does or at a length.
    """

    count: int
    b: End
    h: End
    q_low: End
    q_high: End
    kv_low: End
    kv_high: End
    q_unit: End
    kv_unit: End
    whole: bool = False
