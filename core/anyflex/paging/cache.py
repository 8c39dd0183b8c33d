"""PagedKVCache: keys and values of many sequences, in pages that sequences own and share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from anyflex.errors import ArgumentError, ArgumentTypeError, GraphCaptureError
from anyflex.mods.factory_arguments import checked_int
from anyflex.packed.attention import flex_attention_packed
from anyflex.packed.packed import Step
from anyflex.paging.append_arguments import check_layer, check_rows
from anyflex.paging.append_op import append_op
from anyflex.paging.append_rows import append_rows
from anyflex.paging.places import decoding_places, token_places, token_positions
from anyflex.paging.sequences import Reserved, Sequences
from anyflex.paging.step_numbers import StepNumbers
from anyflex.paging.storage import STORAGES, bytes_of
from anyflex.runtime.kernel_cache import is_capturing
from anyflex.tensors.dynamo_disabled import in_graph
from anyflex.tracing.mod_types import MaskMod, ScoreMod

__all__ = ["PagedKVCache"]

_LONGEST = 2**30
"""Maximum number of tokens of a sequence: the sum of two lengths fits int32."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class PagedKVCache:
    """Keys and values of many sequences, in pages that sequences own, share and give back.

    A forward pass reserves room for its new tokens by `step`; each layer then appends its keys and
    values and attends. A sequence has a slot, which mods see as b for as long as it is open.
    Sequences share pages by forks (`open`) and by common beginnings (`prefix`), and one that
    writes to a shared page gets a copy of it first.

    A cache has no lock: one thread at a time may use it. Its device work goes to the current
    stream in the order of the calls, and each `step` writes again to the tensors of the one
    before.

    Args:
        layers: number of layers; each has its own keys and values, in the same pages.
        pages: P, number of pages. Memory is taken for one more, to which padding rows are written.
        page_size: tokens that a page holds.
        kv_heads: Hkv.
        head_dim: E, of keys.
        value_head_dim: Ev, of values; None is E.
        dtype: of the keys and values that are appended; None is torch's default.
        storage: ``"plain"`` stores them as they are, ``"int8"`` and ``"fp8_e4m3"`` in 8 bits with
            a float32 scale for each token and head.
        slots: the most sequences that are open at a time.
        width: the most pages of one sequence. None is all of them: say less where you can, because
            kernels are planned for it.
        device: None is torch's default.

    Attributes:
        key, value: [layers, P, Hkv, page, E] and [layers, P, Hkv, page, Ev].
        key_scale, value_scale: float32 [layers, P, Hkv, page]; None where storage is plain.
        page_table: int32 [slots, width]; entries past a sequence's length mean nothing.

    Raises:
        ArgumentError, ArgumentTypeError: naming the argument.

    Examples:
        >>> import torch, anyflex
        >>> cache = anyflex.PagedKVCache(1, 8, 16, kv_heads=2, head_dim=32, slots=4)
        >>> slot = cache.open()
        >>> step = cache.step([(slot, 3)])
        >>> q, k, v = torch.randn(3, 4, 32), torch.randn(3, 2, 32), torch.randn(3, 2, 32)
        >>> cache.append(step, 0, k, v)
        >>> causal = lambda b, h, q_idx, kv_idx: q_idx >= kv_idx
        >>> cache.attend(step, 0, q, mask_mod=causal).shape
        torch.Size([3, 4, 32])
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        value_head_dim: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        storage: str = "plain",
        slots: int,
        width: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        width = pages if width is None else width
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        for name, number in (
            ("layers", layers),
            ("pages", pages),
            ("page_size", page_size),
            ("kv_heads", kv_heads),
            ("head_dim", head_dim),
            ("value_head_dim", value_head_dim),
            ("slots", slots),
            ("width", width),
        ):
            checked_int(f"PagedKVCache: {name}", number, 1)
        if width * page_size > _LONGEST or slots * width >= 2**31:
            raise ArgumentError(
                f"PagedKVCache: width * page_size must be at most {_LONGEST}, and slots * width "
                f"less than {2**31}, got {width * page_size} and {slots * width}. Make width the "
                "most pages of one sequence."
            )
        self.dtype = torch.get_default_dtype() if dtype is None else dtype
        if self.dtype not in _DTYPES:
            raise ArgumentTypeError(
                "PagedKVCache: dtype must be that of the keys and values, float32, bfloat16, "
                f"float16 or float64, got {dtype}. storage says how they are stored."
            )
        if storage not in STORAGES:
            raise ArgumentError(
                f"PagedKVCache: storage must be one of {', '.join(STORAGES)}, got {storage!r}."
            )
        if torch.empty(0, device=device).is_meta:
            raise ArgumentError("PagedKVCache: device must hold numbers, got meta.")
        stored = STORAGES[storage] or self.dtype
        # One page more than sequences own: padding rows are written to it.
        shape = (layers, pages + 1, kv_heads, page_size)
        # Tensors that are made in inference mode can't be written outside of it.
        with torch.inference_mode(False):
            key = torch.empty(*shape, head_dim, dtype=stored, device=device)
            value = torch.empty(*shape, value_head_dim, dtype=stored, device=device)
            k_scale = v_scale = None
            if STORAGES[storage]:
                k_scale, v_scale = (
                    torch.empty(shape, dtype=torch.float32, device=device) for _ in "kv"
                )
            self._pools = key, value, k_scale, v_scale
            self._stored = [bytes_of(pool) for pool in self._pools if pool is not None]
            # Eager calls find a layer here: torch takes a microsecond to index a tensor.
            self._layers = [self._layer(layer) for layer in range(layers)]
            self.key, self.value = key[:, :pages], value[:, :pages]
            self.key_scale, self.value_scale = (
                None if scale is None else scale[:, :pages] for scale in (k_scale, v_scale)
            )
            self.device = device = key.device
            self._numbers = StepNumbers(slots, width, width * page_size, device)
            self._sequences = Sequences(slots, width, pages, page_size, self._numbers.staged)
        self.page_table = self._numbers.page_table
        # The reservation of the last step, its batch, and the passes over it.
        self._reserved: Reserved | None = None
        self._batch = self._numbers.batch(1)
        self._passes: list[Step] = []

    @property
    def free_pages(self) -> int:
        """Number of pages that steps can take, those that only `prefix` could still find
        included."""
        return self._sequences.owners.available

    def length(self, slot: int) -> int:
        """Return the number of a sequence's tokens, those of the last step included."""
        return self._sequences.length(slot)

    def open(self, fork_of: int | None = None, length: int | None = None) -> int:
        """Open a sequence and return its slot.

        Args:
            fork_of: slot of a sequence whose pages it shares; None opens an empty sequence.
            length: tokens that it shares; None is all.

        Raises:
            ArgumentError, ArgumentTypeError: all slots are open, fork_of isn't, or it is shorter
                than length.
        """
        return self._sequences.open(fork_of, length)

    def prefix(self, tokens: Sequence[int], salt: Sequence[Any] = ()) -> tuple[int, int]:
        """Open a sequence with the pages that hold the beginning of `tokens`, if any do.

        Returns slot and number of tokens found: of whole pages, and fewer than all, because the
        last token must be fed for what it says comes next. The other tokens are fed by `step`.

        Args:
            tokens: ids of the prompt.
            salt: ints, strings and bytes that change keys and values as tokens do: the adapter,
                hashes of images, the tenant. Sequences of different salts share nothing.

        Raises:
            ArgumentError, ArgumentTypeError: all slots are open, or tokens or salt are wrong.
        """
        return self._sequences.prefix(tokens, salt)

    def commit(self, slot: int, tokens: Sequence[int]) -> None:
        """Make the whole pages of a sequence findable by `prefix`, now and after it has closed.

        Call it when the pass that appended the tokens has run in all layers, at the latest before
        `close`. It costs what the pages cost that are new since the last time.

        Args:
            tokens: ids of all tokens of the sequence; more than its length do no harm, as the one
                that was drawn last.

        Raises:
            ArgumentError, ArgumentTypeError: the slot isn't open, or tokens are fewer than its
                length or no ints.
        """
        self._sequences.commit(slot, tokens)

    def step(self, wanted: Sequence[tuple[int, int]]) -> Step | None:
        """Reserve room for the new tokens of one forward pass.

        Query, key and value of the pass hold the new tokens of each sequence, one sequence after
        the other in the order of `wanted`. Sequences with 0 new tokens may take part.

        Args:
            wanted: (slot, number of new tokens) for each sequence.

        Returns:
            The step, or None if pages lack: nothing has changed then. Trim or close a sequence, or
            ask for less.

        Raises:
            ArgumentError, ArgumentTypeError: a slot is there twice or isn't open, or a sequence
                would be longer than width pages.
            GraphCaptureError: a device graph is being captured.
        """
        if is_capturing(self.device.type):
            raise GraphCaptureError(
                "PagedKVCache.step decides on the host, and a replay of the graph would repeat "
                "its decision: call it before the capture, and `begin` inside."
            )
        reserved = self._sequences.reserve(wanted)
        if reserved is None:
            return None
        self._numbers.send(reserved, self._sequences.changes, self._stored)
        self._outdate_steps()
        self._reserved = reserved
        self._batch = self._numbers.batch(reserved.request.longest)
        self._passes = []
        return self.begin()

    def begin(self) -> Step:
        """Return another pass over the sequences of the last step: inside of a captured graph,
        which then serves all steps of that step's class: of one new token for each sequence, of at
        most 64, or of more.

        Raises:
            ArgumentError: there was no step, or a sequence of it was trimmed or closed since.
        """
        if self._reserved is None:
            raise ArgumentError(
                "PagedKVCache.begin: there is no step, or a sequence of it was trimmed or closed "
                "since. Call step first."
            )
        self._passes.append(self._batch.begin())
        return self._passes[-1]

    def positions(self, step: Step, tokens: int) -> Tensor:
        """Return the position of each new token in its sequence, int32 [T]: what positional
        embeddings want. Rows beyond the step's tokens have 0.

        Args:
            tokens: T, rows of the pass, padding included.
        """
        self._check_pass(step)
        step.check()
        return step.keep(("positions", tokens), token_positions, step.packed, tokens)

    def append(self, step: Step, layer: int, key: Tensor, value: Tensor) -> None:
        """Write a layer's keys and values of the new tokens into their pages.

        Args:
            step: of this pass.
            layer: number of the layer, from 0.
            key: [T, Hkv, E]; T is the number of the step's tokens, or larger: rows beyond them are
                padding and are dropped.
            value: [T, Hkv, Ev].

        Raises:
            ArgumentError, ArgumentTypeError: an argument is wrong; the message names it.
            GraphCaptureError: the step was begun on the other side of a capture's border.
        """
        least = self._check_pass(step)
        key_pool, value_pool, key_scale, value_scale = pools = self._of_layer(layer)
        tokens = check_rows(key, value, pools, self.dtype, least)
        step.check()
        page, row = step.keep(("places", tokens), self._places, step, tokens)
        if in_graph():
            append_op(*pools, key, value, page * key_pool.shape[2] + row, drops=False)
        else:
            append_rows(((key_pool, key_scale, key), (value_pool, value_scale, value)), page, row)

    def attend(
        self,
        step: Step,
        layer: int,
        query: Tensor,
        score_mod: ScoreMod | None = None,
        mask_mod: MaskMod | None = None,
        **rest: Any,
    ) -> Any:
        """Attend to a layer's keys, the new ones included if they were appended.

        Args:
            step: of this pass.
            layer: number of the layer, from 0.
            query: [T, Hq, E]; Hq is a multiple of Hkv.
            score_mod, mask_mod: see slots as b, and positions in the sequence as q_idx and kv_idx.
            rest: scale, sinks, out, return_aux, batch_invariant, kernel_options and backend, as
                for `flex_attention_packed`, which says what is returned and raised.
        """
        least = self._check_pass(step)
        key, value, key_scale, value_scale = self._of_layer(layer)
        if isinstance(query, Tensor) and query.dim() and query.shape[0] < least:
            raise ArgumentError(
                f"query must have a row for each of the step's {least} new tokens, got "
                f"{query.shape[0]}."
            )
        if key_scale is not None:
            rest["k_scale"], rest["v_scale"] = key_scale, value_scale
        return flex_attention_packed(
            query, key, value, step, score_mod, mask_mod, enable_gqa=True, **rest
        )

    def trim(self, slot: int, length: int) -> None:
        """Forget all tokens of a sequence but the first `length`: drafts that were rejected, or,
        with 0, a sequence that is preempted and fed again later.

        Raises:
            ArgumentError, ArgumentTypeError: the slot isn't open, or its sequence is shorter.
        """
        before = self._sequences.length(slot)
        self._sequences.trim(slot, length)
        if length < before:
            self._end_pass(slot)

    def close(self, slot: int) -> None:
        """Give a sequence's pages and its slot back.

        Raises:
            ArgumentError, ArgumentTypeError: the slot isn't open.
        """
        self._sequences.close(slot)
        self._end_pass(slot)

    def _end_pass(self, slot: int) -> None:
        """End the last step if the slot takes part in it: its pages may get other owners."""
        if self._reserved is not None and slot in self._reserved.request.counts:
            self._reserved, self._passes = None, []
            self._outdate_steps()

    def _outdate_steps(self) -> None:
        for batch in self._numbers.batches:
            batch.outdate_steps()

    def _places(self, step: Step, tokens: int) -> tuple[Tensor, Tensor]:
        """Return page and row of each new token."""
        _, pages, _, size, _ = self.key.shape
        # A captured graph and a compiled program serve other steps too.
        if not (in_graph() or step.captured) and self._reserved is not None:
            request = self._reserved.request
            if request.feeds_one_each() and request.total == tokens:
                return decoding_places(step.packed, tokens, size)
        return token_places(step.packed, tokens, pages, size)

    def _layer(self, layer: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        key, value, key_scale, value_scale = self._pools
        if key_scale is None or value_scale is None:
            return key[layer], value[layer], None, None
        return key[layer], value[layer], key_scale[layer], value_scale[layer]

    def _of_layer(self, layer: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return a layer's pools, with the page that nobody reads, and their scales."""
        check_layer(layer, len(self._layers))
        # A recorded program writes to the whole tensor: views of it would be inputs of their own.
        return self._layer(layer) if in_graph() else self._layers[layer]

    def _check_pass(self, step: Any) -> int:
        """Check that the step is one of this pass, and return the number of its tokens."""
        # A compiled program is checked where it was called from: a guard on the present step would
        # compile it again for the next.
        if in_graph():
            return 0
        if type(step) is not Step or step not in self._passes or self._reserved is None:
            self._refuse_pass(step)
        return self._reserved.request.total

    def _refuse_pass(self, step: Any) -> NoReturn:
        if not isinstance(step, Step):
            raise ArgumentTypeError(f"step must be a Step, got {type(step).__name__}.")
        if not any(step.packed is batch for batch in self._numbers.batches):
            raise ArgumentError("step is of another cache: use one of this cache's `step`.")
        raise ArgumentError(
            "step is over: `step` was called since, or one of its sequences was trimmed or closed "
            "and its pages may belong to others. Call step again."
        )
