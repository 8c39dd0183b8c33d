"""Keys and values in pages, collected into packed rows for kernels that know no pages."""

from __future__ import annotations

import torch
from torch import Tensor

from anyflex.errors import ModIndexError
from anyflex.packed.packed import Packed
from anyflex.registry.environment import check_indices
from anyflex.tensors.dynamo_disabled import in_graph

__all__ = ["PageRows", "check_pages"]


class PageRows:
    """Where the keys of a batch lie in a pool of pages.

    Attributes:
        begins: int32 [N], first packed row of each sequence.
        keys: S, the number of packed rows: of a batch on a CPU as many as it has keys, elsewhere,
            where the host doesn't know them, as many as its bounds allow.
    """

    def __init__(self, packed: Packed, pages: int, page_size: int) -> None:
        table = packed.page_table
        assert table is not None
        lengths = packed.kv_lengths.clamp(0, packed.max_kv)
        ends = lengths.cumsum(0, dtype=torch.int32)
        self.begins = ends - lengths
        reads_values = packed.device.type == "cpu" and not in_graph()
        if reads_values:
            self.keys = int(ends[-1]) if packed.sequences else 0
        else:
            self.keys = packed.sequences * packed.max_kv
        row = torch.arange(self.keys, dtype=torch.int32, device=packed.device)
        owner = torch.searchsorted(ends, row, right=True)
        inside = owner < packed.sequences
        owner = owner.clamp(max=max(packed.sequences - 1, 0))
        position = torch.where(inside, row - self.begins[owner], 0)
        table_row = owner if packed.table_rows is None else packed.table_rows[owner].long()
        page = (position // page_size).clamp(max=max(table.shape[1] - 1, 0))
        found = table[table_row.clamp(0, max(table.shape[0] - 1, 0)), page].long()
        if reads_values or (check_indices() and not in_graph()):
            _check(found[inside], pages)
        self._page = found.clamp(0, max(pages - 1, 0))
        self._at = (position % page_size).long()
        self._inside = inside

    def collect(self, pool: Tensor) -> Tensor:
        """Return [S, Hkv, ...] of a pool [P, Hkv, page, ...]; padding rows are 0."""
        rows = pool[self._page, :, self._at]
        inside = self._inside.view(-1, *[1] * (rows.dim() - 1))
        return torch.where(inside, rows, rows.new_zeros(()))


def _check(found: Tensor, pages: int) -> None:
    wrong = (found < 0) | (found >= pages)
    if bool(wrong.any()):
        raise ModIndexError(
            f"page_table names page {int(found[wrong][0])} for a key that is read, and the pool "
            f"has the pages 0 to {pages - 1}",
            operation="page_table",
        )


def check_pages(packed: Packed, pages: int, page_size: int) -> None:
    """Check the page of each key that is read.

    Raises:
        ModIndexError: it is outside of the pool.
    """
    table = packed.page_table
    assert table is not None
    rows = table if packed.table_rows is None else table[packed.table_rows.long()]
    rows = rows[: packed.sequences]
    longest = int(packed.kv_lengths.max()) if packed.sequences else 0
    rows = rows[:, : -(-longest // page_size)]
    columns = torch.arange(rows.shape[1], dtype=torch.int32, device=table.device)
    _check(rows[columns * page_size < packed.kv_lengths[:, None]], pages)
