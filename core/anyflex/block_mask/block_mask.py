"""BlockMask: which blocks of the score matrix are visited, and how. Format 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anyflex.block_mask import pytree, row_slicing, slicing
from anyflex.block_mask.combine import noop_mask
from anyflex.block_mask.in_graphs import rows_in_graph, runs_in_graph
from anyflex.block_mask.mask_function import sliced_mask_mod, trace_mask_mod
from anyflex.block_mask.mask_state import MaskContent
from anyflex.block_mask.offset_mask_mod import Shifts, shifted_mod, shifted_opaque
from anyflex.errors import BlockMaskError
from anyflex.mask_structure.device_views import MaskViews
from anyflex.mask_structure.from_index_lists import views_of_lists
from anyflex.mask_structure.given_runs import views_of_runs
from anyflex.mask_structure.run_checks import checked_block_size, checked_lengths
from anyflex.mask_structure.runs import padded
from anyflex.tensors.dynamo_disabled import in_graph, outside_graphs
from anyflex.tracing.mod_types import MaskMod

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["BlockMask"]


def _torch_list(name: str) -> property:
    @outside_graphs
    def read(mask: BlockMask) -> Tensor:
        from anyflex.block_mask.torch_format import torch_lists

        return torch_lists(mask)[name]

    return property(read, doc=f"`{name}` of `to_torch()`, derived when it is first asked for.")


class BlockMask(MaskContent):
    """For each row of blocks a short list of runs of kv blocks, FULL or PARTIAL.

    Structure wins: in FULL blocks the mask mod is not applied, blocks that no run covers are not
    visited, whatever the mask mod says. FULL means that every element inside the lengths is live.
    Made by `create_block_mask`, `from_runs`, `from_kv_blocks` or `from_torch`. Masks of equal
    content are equal and hash alike, wherever they are.

    A mask is frozen but for `mask_mod`: it owns its tensors, and nobody may write to them. What
    its mask mod captured stays the user's. The mask mod reads those tensors at each call, while
    the structure was computed from the values that they had when the mask was built: where they
    are changed in place and the blocks with them, build a mask anew.

    Attributes:
        offsets: int32 [B', H', Qb + 1]; the runs of row r are ``runs[offsets[r]:offsets[r + 1]]``.
            B' and H' are 1 where the mask is the same for all batch entries or heads.
        runs: int32 [n, 3]: first block, end block (excluded), kind; n may exceed ``offsets[-1]``.
        seq_lengths: (Q_LEN, KV_LEN) in elements.
        BLOCK_SIZE: (q, kv) in elements.
        traced: the mask mod as plain data, or None.
        opaque: the mask mod where it could not be traced but is pure; or None.
        needs_mask_mod: there are PARTIAL runs and no mask mod: a slice of torch's, to which
            `mask_mod` must be assigned before it is used.
    """

    def __init__(self, *_: object, **__: object) -> None:
        raise BlockMaskError(
            "BlockMask(...) makes no mask: call create_block_mask, BlockMask.from_runs, "
            "BlockMask.from_kv_blocks or BlockMask.from_torch"
        )

    @classmethod
    def from_runs(
        cls,
        offsets: Tensor,
        runs: Tensor,
        *,
        seq_lengths: tuple[int, int],
        block_size: int | tuple[int, int] = 128,
        mask_mod: MaskMod | None = None,
        capacity: int | None = None,
    ) -> Self:
        """Return the mask of these runs.

        Inside of ``torch.compile`` and ``torch.export`` it is one operation of the graph, which
        checks them when the program runs: on a device, each time, with a synchronisation.

        Examples:
            >>> offsets = torch.tensor([[[0, 1, 3]]], dtype=torch.int32)
            >>> runs = torch.tensor([[0, 1, 2], [0, 1, 1], [1, 2, 2]], dtype=torch.int32)
            >>> causal = lambda b, h, q, k: q >= k
            >>> mask = BlockMask.from_runs(offsets, runs, seq_lengths=(256, 256), mask_mod=causal)
            >>> mask.sparsity()
            25.0

        Args:
            offsets: int32 [B', H', Qb + 1], ending with n.
            runs: int32 [n, 3] on the same device: first block, end block, FULL or PARTIAL;
                increasing and disjoint in each row. Neighbours of one kind are merged.
            seq_lengths: (Q_LEN, KV_LEN).
            block_size: int, or (q, kv).
            mask_mod: needed if there is a PARTIAL run.
            capacity: rows that `runs` shall have at least. A mask with spare rows is the one that
                may be rewritten: a CUDA graph that has captured its forward may write new values
                into the mask's `offsets` and `runs` between replays. Nothing checks them, and
                forms derived from the mask before are not updated: the transpose that backward
                reads, slices of rows, copies on other devices.

        Raises:
            BlockMaskError: naming the row, run or position that is wrong.
        """
        if in_graph():
            return runs_in_graph(cls, offsets, runs, seq_lengths, block_size, mask_mod, capacity)
        lengths, sizes = checked_lengths(seq_lengths), checked_block_size(block_size)
        # Copies, because the caller may write to their tensors but nobody to the mask's.
        host = views_of_runs(offsets, runs, lengths, sizes, mask_mod is not None, capacity)
        device = offsets.device
        offsets, runs = host.offsets.to(device), padded(host.runs, capacity or 0).to(device)
        traced, opaque = None, None
        if mask_mod is not None:
            traced, opaque = trace_mask_mod(mask_mod, device)
        views = MaskViews(offsets, runs, *lengths, sizes)
        return cls._assembled(views, traced, opaque, mask_mod)

    @classmethod
    @outside_graphs
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: MaskMod | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        *,
        dq_write_order: Tensor | None = None,
        dq_write_order_full: Tensor | None = None,
        dq_kv_order: Tensor | bool | None = None,
    ) -> Self:
        """Return the mask of torch's index lists: torch's arguments, torch's meaning.

        Args:
            kv_num_blocks, kv_indices: [B', H', Qb] and [B', H', Qb, width], int32 or int64:
                PARTIAL blocks of each row, in any order. B' and H' may be left out.
            full_kv_num_blocks, full_kv_indices: FULL blocks, both or neither.
            mask_mod: None means that every element of the PARTIAL blocks is live.
            seq_lengths: None means whole blocks: Qb and `width` of them.
            compute_q_blocks, dq_write_order, dq_write_order_full, dq_kv_order: accepted for
                torch's sake. The transpose is made when it is needed, and deterministic gradients
                need no order.

        Raises:
            BlockMaskError: naming the row and block that is wrong.
        """
        views = views_of_lists(
            kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, BLOCK_SIZE, seq_lengths
        )
        mask = cls._assembled(views)
        if mask_mod is sliced_mask_mod:
            return cls._assembled(views, mask_mod=mask_mod) if mask.has_partial() else mask
        if mask_mod is not None or mask.has_partial():
            mask.mask_mod = noop_mask if mask_mod is None else mask_mod
        return mask

    @classmethod
    @outside_graphs
    def from_torch(cls, mask: Any) -> Self:
        """Return what a ``torch.nn.attention.flex_attention.BlockMask`` means.

        A mask of anyflex is returned as it is. Raises ArgumentTypeError if it is something else,
        BlockMaskError if it is damaged or of a torch version whose masks hold more than this
        version of anyflex knows.
        """
        if isinstance(mask, cls):
            return mask
        from anyflex.block_mask.torch_format import torch_fields

        return cls.from_kv_blocks(**torch_fields(mask))

    def to_torch(self) -> Any:
        """Return torch's BlockMask: the lists that its create_block_mask makes.

        Its B and H are those of `shape`. A FULL block that reaches past the lengths becomes
        PARTIAL, as torch has it.
        """
        from anyflex.block_mask.torch_format import torch_mask

        return torch_mask(self)

    kv_num_blocks = _torch_list("kv_num_blocks")
    kv_indices = _torch_list("kv_indices")
    full_kv_num_blocks = _torch_list("full_kv_num_blocks")
    full_kv_indices = _torch_list("full_kv_indices")
    q_num_blocks = _torch_list("q_num_blocks")
    q_indices = _torch_list("q_indices")
    full_q_num_blocks = _torch_list("full_q_num_blocks")
    full_q_indices = _torch_list("full_q_indices")

    def as_tuple(self, flatten: bool = True) -> tuple[Any, ...]:
        """Return torch's tuple of `to_torch()`, whose items differ by torch's version."""
        return tuple(self.to_torch().as_tuple(flatten))

    @outside_graphs
    def __getitem__(self, index: Any) -> Self:
        """Return the mask of chosen batch entries, heads and rows of q blocks.

        Up to three indices: ints (the dimension stays, with length 1), slices, or one vector of
        positions; a fourth, for kv, can only be ``:``. Chosen rows are packed: they become rows 0,
        1, ... and Q_LEN is theirs. The mask mod goes along: it sees the indices that it saw in the
        whole mask. torch's slices keep the whole Q_LEN, and need a mask mod and ``seq_lengths``
        assigned, which works here too. Raises BlockMaskError for an index out of range.
        """
        return self._derived(*slicing.select(self, index))

    def row_slice(self, start: int, stop: int, *, kv_len: int | None = None) -> Self:
        """Return the mask of the query rows start..stop, counted in elements: one step of decoding
        or one chunk of a prefill.

        The mask mod sees the rows' own numbers. Slices that differ in `start` share one kernel.
        Rows that begin where a block does, and rows of one block, are copied where they are, with
        no synchronisation; others are combined on the host: a block is FULL or left out if all
        that it is made of is, else PARTIAL. Inside of ``torch.compile`` and ``torch.export`` it is
        one operation of the graph; the host does it when the program runs.

        Examples:
            >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256)
            >>> mask.row_slice(255, 256).shape
            (1, 1, 1, 256)

        Args:
            start, stop: 0 <= start <= stop <= Q_LEN.
            kv_len: keep the first `kv_len` keys only, at most KV_LEN; None keeps all.

        Raises:
            BlockMaskError: out of range; or a block would mix kinds, and the structure was not
                built from the mask mod, which therefore can't tell its elements.
        """
        if in_graph():
            return rows_in_graph(self, start, stop, kv_len)
        return self._derived(*row_slicing.sliced_rows(self, start, stop, kv_len), self._asked)

    @outside_graphs
    def extend(
        self,
        kv_len: int,
        q_len: int | None = None,
        *,
        mask_mod: MaskMod | None = None,
        exact: bool = False,
    ) -> Self:
        """Return the mask for longer keys (and queries): only what is new is built.

        For a mask of `create_block_mask` the result is what that would make for the new lengths.

        Args:
            kv_len: at least KV_LEN.
            q_len: at least Q_LEN; None keeps it.
            mask_mod: the mask mod from now on, where the old one's captured tensors have grown or
                were filled in place. The caller promises that it says the same of the old part.
            exact: as for `create_block_mask`, of the new part.

        Raises:
            BlockMaskError: a length shrinks; there is no mask mod; or the last block is ragged
                and the structure was not built from the mask mod, which would have to decide it.
            ModTraceError, ModIndexError: as `create_block_mask` raises them.
        """
        from anyflex.block_mask.extend import extended

        return extended(self, kv_len, q_len, mask_mod, exact)

    def _derived(self, views: MaskViews, shifts: Shifts, asked: tuple[int, int] | None) -> Self:
        """Return a mask of other rows with this mask's mask mod."""
        traced, opaque, mask_mod = self.traced, self.opaque, self._mask_mod
        if shifts and traced is not None:
            traced, mask_mod = shifted_mod(traced, shifts), None
        elif shifts and opaque is not None:
            opaque = mask_mod = shifted_opaque(opaque, shifts)
        alone = self._zero_alone
        # One of several batch entries or heads is alone too. The indices that an opaque mask mod
        # reads aren't known.
        if alone is not None and traced is not None:
            sizes = zip(("b", "h"), self.offsets.shape[:2], views.shape[:2], strict=True)
            alone += tuple(index for index, before, now in sizes if before > 1 and now == 1)
        return self._assembled(views, traced, opaque, mask_mod, alone, asked)

    def __repr__(self) -> str:
        return (
            f"BlockMask(shape={self.shape}, BLOCK_SIZE={self.BLOCK_SIZE}, "
            f"runs={int(self.runs.shape[0])}, device={str(self.offsets.device)!r}, "
            f"mask_mod={getattr(self._mask_mod, '__name__', self.mask_mod)})"
        )


pytree.register(BlockMask)
# A mask's state is plain data: torch.load takes it under weights_only=True, and so does
# torch.export.load as part of a program's example inputs.
torch.serialization.add_safe_globals([BlockMask])
