"""Mods in FlashAttention-4's form: functions on CuTe's register vectors.

Imports CUTLASS's Python packages: `anyflex_flash4.backend` imports it in ``compile``.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from typing import Any

from anyflex_flash4.operations import Operations

__all__ = ["CuteMods"]

_TYPES = {
    "bool": "Boolean",
    "u8": "Uint8",
    "i8": "Int8",
    "i16": "Int16",
    "i32": "Int32",
    "i64": "Int64",
    "f16": "Float16",
    "bf16": "BFloat16",
    "f32": "Float32",
    "f64": "Float64",
}
_OTHER_NAMES = {"round": "roundeven", "fmod": "rem"}


class CuteMods:
    """The functions that FlashAttention-4 is given, each with a name for its compile cache.

    Args:
        source: text of `anyflex_flash4.mods.write_source`, which names them.
        functions: of `anyflex_flash4.mods.load_source`.
        reads: whether the mods read the call's ints, and its floats: each is then the next tensor
            behind the captured ones.
        table_count: captured tensors, the first of the tensors that a call hands over.
    """

    def __init__(
        self,
        source: str,
        functions: dict[str, Callable[..., Any]],
        reads: tuple[bool, bool],
        table_count: int,
    ) -> None:
        self._cutlass = importlib.import_module("cutlass")
        self._cute = importlib.import_module("cutlass.cute")
        self._select_of = importlib.import_module("cutlass.cutlass_dsl").select_
        self._ops = self._operations()
        self._reads = reads
        self._table_count = table_count
        self._digest = hashlib.sha256(source.encode()).hexdigest()
        self.score_mod = self._score_mod(functions.get("score_mod"))
        self.score_mod_bwd = self._score_mod_bwd(functions.get("score_mod_bwd"))
        self.mask_mod = self._mask_mod(functions.get("mask_mod"))

    def _operations(self) -> Operations:
        types = {name: getattr(self._cutlass, cute) for name, cute in _TYPES.items()}
        return Operations(types, self._select, self._function)

    def _function(self, name: str) -> Callable[..., Any]:
        function = getattr(self._cute.math, _OTHER_NAMES.get(name, name))
        wide = (self._cutlass.Float32, self._cutlass.Float64)

        def called(*operands: Any) -> Any:
            return function(*(x if isinstance(x, wide) else wide[0](x) for x in operands))

        return called

    def _select(self, condition: Any, a: Any, b: Any) -> Any:
        # Facts that CuTe has while it traces.
        if isinstance(condition, bool) or isinstance(condition.value, (bool, int)):
            return a if bool(getattr(condition, "value", condition)) else b
        return type(a)(self._select_of(condition, a, b))

    def _split(self, tensors: Any) -> tuple[Any, Any, Any]:
        """(tables, ints, floats) of a call's tensors."""
        tensors = list(tensors or ())
        tables, rest = tensors[: self._table_count], tensors[self._table_count :]
        ints = rest.pop(0) if self._reads[0] else ()
        floats = rest.pop(0) if self._reads[1] else ()
        return tables, ints, floats

    def _lanes(self, dtype: Any, like: Any, value_of: Callable[[int], Any]) -> Any:
        """A register vector as long as `like`, lane by lane."""
        count = self._cute.size(like.shape)
        made = self._cute.make_rmem_tensor(count, dtype)
        for lane in range(count):
            made[lane] = dtype(value_of(lane))
        return made.load()

    def _named(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        # Distinguishes mods: FlashAttention-4 would compare bytecode alone, which is the same for
        # every mod.
        function.__cute_hash__ = f"anyflex {name} {self._digest}"  # type: ignore[attr-defined]
        return function

    def _score_mod(self, body: Callable[..., Any] | None) -> Callable[..., Any] | None:
        if body is None:
            return None

        def score_mod(
            score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
        ) -> Any:
            read = self._split(aux_tensors)
            return self._lanes(
                self._cutlass.Float32,
                score,
                lambda i: body(self._ops, *read, score[i], b[i], h[i], q_idx[i], kv_idx[i]),
            )

        return self._named(score_mod, "score_mod")

    def _score_mod_bwd(self, body: Callable[..., Any] | None) -> Callable[..., Any] | None:
        if body is None:
            return None

        def score_mod_bwd(
            grad: Any,
            score: Any,
            b: Any,
            h: Any,
            q_idx: Any,
            kv_idx: Any,
            seqlen_info: Any,
            aux_tensors: Any,
        ) -> Any:
            read = self._split(aux_tensors)
            zero = self._cutlass.Float32(0.0)

            def value(i: int) -> Any:
                scalars = (grad[i], score[i], b[i], h[i], q_idx[i], kv_idx[i])
                passed = body(self._ops, *read, *scalars)
                # At a dead pair the slope may be NaN, and what arrives is 0.
                return self._select(grad[i] == zero, zero, passed)

            return self._lanes(self._cutlass.Float32, grad, value)

        return self._named(score_mod_bwd, "score_mod_bwd")

    def _mask_mod(self, body: Callable[..., Any] | None) -> Callable[..., Any] | None:
        if body is None:
            return None

        def mask_mod(
            b: Any, h: Any, q_idx: Any, kv_idx: Any, seqlen_info: Any, aux_tensors: Any
        ) -> Any:
            read = self._split(aux_tensors)
            return self._lanes(
                self._cutlass.Int32,
                q_idx,
                lambda i: body(self._ops, *read, b[i], h[i], q_idx[i], kv_idx[i]),
            )

        return self._named(mask_mod, "mask_mod")
