"""Kernel class of a compiled spec: chooses the launches of a call, and their workspace."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from anyflex.plugin import Call, GradInputs, Grads, Kernel, Outputs, Saved, TensorSpec
from anyflex_triton.backward_call import (
    backward_key,
    backward_values,
    expected_backward,
    integer_specs,
    key_columns,
    key_sums_specs,
    keys_launch,
    queries_launch,
    rows_launch,
    sums_launch,
    total_launches,
)
from anyflex_triton.configs import Config, KernelName
from anyflex_triton.forward_call import (
    SHORT_ROWS,
    cores,
    decoded_rows,
    launch_decode,
    launch_prefill,
    packed_heads,
    splits_of,
)
from anyflex_triton.kernel_signatures import KernelInputs, Programs
from anyflex_triton.launch import FixedLaunch, Launch, kept_launch, launch_all
from anyflex_triton.mask_refinement import Tiled, finer_specs, rows_for, with_rows
from anyflex_triton.mods import Sums
from anyflex_triton.program import Program

__all__ = ["TritonKernel"]


class TritonKernel(Kernel):
    """Chooses and launches the kernels of one spec."""

    def __init__(self, given: KernelInputs) -> None:
        self.spec = given.spec
        self._note = given.note
        self._made = Programs(given)
        self._key_columns = key_columns(self.spec)

    def describe(self, call: Call) -> str:
        """Return ``decode splits=8`` or ``prefill 128x64``. Under autotuning it also tells whether
        forward's config was found by timing, ``prefill 64x64, tuned``; and it tells where products
        are rounded to TF32: ``prefill 128x64 tf32``."""
        made = self._made
        decodes = self._decodes(call)
        name: KernelName = "decode" if decodes else "forward"
        tuned = made.tuned(name, call)
        state = "" if not made.tunes(name) else ", not tuned yet" if tuned is None else ", tuned"
        products = " tf32" if made.in_tf32 else ""
        note = self._note
        if self.spec.batch_invariant:
            some = f" and decode splits={splits_of(self.spec, call).number}"
            note = f"{some if self._decodes_some(call) else ''}, batch-invariant{note}"
        if decodes:
            number = splits_of(self.spec, call).number
            return f"decode splits={number}{products}{state}{note}"
        config = tuned or made.config("forward")
        return f"prefill {config.block_m}x{config.block_n}{products}{state}{note}"

    def _decodes_some(self, call: Call) -> bool:
        """Whether the sequences of few rows are decoded, and the prefill kernel takes others."""
        return (
            self.spec.batch_invariant
            and not self._decodes(call)
            and bool(decoded_rows(self.spec, call))
        )

    def _decodes(self, call: Call) -> bool:
        length = call.query.shape[2] if call.packed is None else call.packed.max_q
        if self.spec.batch_invariant:
            return 0 < length <= decoded_rows(self.spec, call)
        if not 0 < length * packed_heads(self.spec, call) <= SHORT_ROWS:
            return False
        return call.mask is None or length <= self.spec.block_size[0]

    def saved_outputs(self, call: Call) -> tuple[TensorSpec, ...]:
        """Return the rounding residual of out, if any, which backward's delta needs, and each
        row's row_max and row_sum, which weights of rows with huge scores need."""
        spec, rows = self.spec, call.query.shape[:3]
        if not spec.needs_backward:
            return ()
        tops = TensorSpec((*rows, 2), torch.float32)
        if spec.dtype is torch.float32:
            return (tops,)
        return (TensorSpec((*rows, spec.value_head_dim), spec.dtype), tops)

    def workspace(
        self, call: Call, direction: Literal["forward", "backward"]
    ) -> tuple[TensorSpec, ...]:
        """Return the workspace: the splits' results for decoding, and finer runs of the mask for
        each other kernel that takes them. Backward's holds row values, the sums of dK and dV
        of split KV heads, and integers that add up captured tensors' gradients."""
        if direction == "backward":
            batch, heads, length = call.query.shape[:3]
            # Each head's values begin at a multiple of 16 bytes. The gradient of value alone needs
            # no delta.
            planes = 4 if self._made.wants_delta else 3
            rows = TensorSpec((planes, batch, heads, -(-length // 4) * 4), torch.float32)
            return (
                rows,
                *self._key_sums_specs(call),
                *self._finer_specs(call, "keys"),
                *self._finer_specs(call, "queries"),
                *integer_specs(self._made, call),
            )
        if not (self._decodes(call) or self._decodes_some(call)):
            return finer_specs(self._made, call, "forward")

        # Decoding calls repeat token by token and layer by layer. One tensor, because an
        # allocation takes some microseconds of the host's time.
        def make() -> tuple[TensorSpec, ...]:
            return (TensorSpec((splits_of(self.spec, call).size,), torch.float32),)

        return self._made.kept(call, "anyflex_triton.splits", make)

    def _key_sums_specs(self, call: Call) -> tuple[TensorSpec, ...]:
        """Return `key_sums_specs`, if the spec's gradients need it."""
        columns = self._key_columns["D"] + self._key_columns["DV"]
        if not columns:
            return ()

        def make() -> tuple[TensorSpec, ...]:
            query, key = call.query.shape, call.key.shape
            tile = self._made.config("keys").block_n
            return key_sums_specs(query, key, tile, key[2], columns, cores(call.query.device))

        return self._made.kept(call, "anyflex_triton.key_sums", make)

    def _finer_specs(self, call: Call, kernel: Tiled) -> tuple[TensorSpec, ...]:
        """Return `finer_specs` of a kernel, if the spec's gradients need it."""
        if not self._made.is_finer:
            return ()
        wanted = set(self.spec.gradients)
        if kernel == "keys" and not wanted & {"k", "v"}:
            return ()
        if kernel == "queries" and "q" not in wanted and not self._made.learned:
            return ()
        return finer_specs(self._made, call, kernel)

    def forward(self, call: Call, out: Outputs) -> None:
        """Fill `out`.

        Raises:
            ArgumentError: a kernel with the user's options needs more than a multiprocessor has.
        """
        if out.out.numel() == 0 and (out.lse is None or out.lse.numel() == 0):
            return
        try:
            decodes = self._decodes(call)
            if not decodes:
                launch_prefill(self._made, call, out, self._of_backward)
            if decodes or self._decodes_some(call):
                launch_decode(self._made, call, out)
        except OutOfResources as error:
            self._made.blame_options("forward", error)
            raise

    def _of_backward(self, call: Call, out: Outputs) -> list[Program]:
        """Return the programs that a training call's backward will need if dout is laid out as
        out."""
        if self._made.tuner is not None:
            return []
        given = expected_backward(self.spec, call, out, self.workspace(call, "backward"))
        return [launch.program for launch in self._backward_launches(call, *given, {})]

    def backward(self, call: Call, saved: Saved, grad: GradInputs, grads: Grads) -> None:
        """Fill `grads`. Raises as forward does."""
        if call.query.numel() == 0 or call.key.numel() == 0 or call.value.numel() == 0:
            for gradient in (grads.dq, grads.dk, grads.dv):
                if gradient is not None:
                    gradient.zero_()
            return
        try:
            parts = self.fixed_parts(call, saved, grad)
            launches = self._backward_launches(call, saved, grad, grads, parts)
            launch_all(launches, call.query.device)
        except OutOfResources as error:
            self._made.blame_options("backward", error)
            raise

    def fixed_parts(self, call: Call, saved: Saved, grad: GradInputs) -> dict[object, FixedLaunch]:
        """Return the launches of the portable backward that calls of the same shapes, strides and
        alignment have made so far."""
        key = backward_key(self._made, call, saved, grad)
        return self._made.kept(call, key, dict)

    def _backward_launches(
        self,
        call: Call,
        saved: Saved,
        grad: GradInputs,
        grads: Grads,
        parts: dict[object, FixedLaunch],
    ) -> list[Launch]:
        """Return the launches that fill the non-empty tensors of `grads`.

        Args:
            parts: result of `fixed_parts`.
        """
        made = self._made
        row_values, *rest = grads.workspace
        values = backward_values(made, call, saved, grad, grads, row_values)
        key_sums = rest.pop(0) if self._key_sums_specs(call) else None
        keys_end = len(self._finer_specs(call, "keys"))
        queries_end = keys_end + len(self._finer_specs(call, "queries"))
        for_keys, for_queries = rest[:keys_end], rest[keys_end:queries_end]
        integers = rest[queries_end:]
        of_rows = partial(rows_launch, made, call, saved, grad, row_values)
        first = kept_launch(parts, "rows", of_rows).launch(values)
        if grads.dk is None and grads.dv is None:
            before, queries = self.query_launches(
                call, values, grads, for_queries, integers, [first], parts
            )
            return [*before, first, *queries]
        rows, before_keys = rows_for(made, call, "keys", for_keys)
        of_keys = with_rows({**values, "key_sums": key_sums}, rows)

        def keys(config: Config) -> Launch:
            make = partial(
                keys_launch, made, call, grad.dout, row_values, grads, key_sums, rows, config
            )
            key = ("keys", made.tuner and config, None if rows is None else rows.block_size)
            return kept_launch(parts, key, make).launch(of_keys)

        until_keys = [*before_keys, first]
        until_keys.append(made.launch("keys", call, keys, until_keys))
        before, queries = self.query_launches(
            call, values, grads, for_queries, integers, until_keys, parts, follows_keys=True
        )
        # No other launch may stand between launches that overlap.
        launches = [*before, *until_keys, *queries]
        if key_sums is not None:
            add = partial(sums_launch, made, call, grads, key_sums, self._key_columns)
            launches.append(kept_launch(parts, "sums", add).launch(of_keys))
        return launches

    def query_launches(
        self,
        call: Call,
        values: dict[str, Any],
        grads: Grads,
        finer: Sequence[Tensor],
        integers: Sequence[Tensor],
        first: Sequence[Launch],
        parts: dict[object, FixedLaunch],
        follows_keys: bool = False,
    ) -> tuple[list[Launch], list[Launch]]:
        """Return two lists of launches: those that refine the mask's runs, which may run any time
        before, and those that fill grads.dq and add to captured tensors' gradients, if these are
        wanted.

        Args:
            values: result of `backward_values`.
            first: the launches that fill its row values; where the queries' launch
                `follows_keys`, up to that of keys.
            finer, integers: parts of the workspace.
            parts: result of `fixed_parts`.
            follows_keys: argument of `queries_launch`.
        """
        made = self._made
        totals = [total for total in grads.captured if total is not None]
        if grads.dq is None and not totals:
            return [], []
        rows, before = rows_for(made, call, "queries", finer)
        if finer:
            values = with_rows(values, rows)
        blocks = None if rows is None else rows.block_size

        def queries(
            config: Config, dq: Tensor | None, totals: Sequence[Tensor], sums: Sums = "floats"
        ) -> Launch:
            make = partial(
                queries_launch, made, call, values["dout"], values["row_values"], dq, totals, rows,
                config, sums, follows_keys,
            )  # fmt: skip
            key = ("queries", made.tuner and config, blocks, dq is None, sums, follows_keys)
            return kept_launch(parts, key, make).launch(values, totals)

        if integers:
            places = (*totals, *integers)
            values = {**values, "totals": places}
            config = made.config("queries")
            follows_keys = False
            return before, [
                queries(config, None, places, "bounds"),
                queries(config, grads.dq, places, "integers"),
                *total_launches(made, totals, integers, parts),
            ]
        return before, [
            made.launch("queries", call, lambda c: queries(c, grads.dq, totals), [*before, *first])
        ]
