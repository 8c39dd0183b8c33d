"""The sound mod key: a traced mod is reused only under a key that covers all that it can read.

A function can read its cells, defaults and globals, and through them other functions, partials,
numbers, strings, tensors and tuples of these. `_Reader` walks all of it and puts every value into
the key, by type and value. Whatever it can't see through (objects, lists, dicts, modules other
than torch and math, an unknown attribute or builtin name, an import, a store to an outer variable)
makes the mod uncacheable: it is then traced at each call. No stale number, ever.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from anyflex.mod_graph.dtypes import DTYPE_NAMES
from anyflex.process.fork_safe_locks import free_in_child
from anyflex.tracing.conversions import FACTORIES
from anyflex.tracing.symbol import Symbol
from anyflex.tracing.torch_functions import ROW_FUNCTIONS, SPELLINGS
from anyflex.tracing.trace import TracedMod, trace_mod

__all__ = ["traced"]

CACHE_SIZE = 1024
"""Traces kept; a mod whose closed-over numbers always change would fill any number."""

_MODULES = {
    id(module): module for module in (torch, math, operator, torch.nn, torch.nn.functional)
}
"""Modules whose attributes are taken for constants."""

_BUILTINS = frozenset(
    "abs bool enumerate float int len list max min pow range reversed round sum tuple zip "
    "True False None".split()
)
_ATTRIBUTES = frozenset(
    [
        *(function.__name__ for function in [*SPELLINGS, *FACTORIES]),
        *ROW_FUNCTIONS,
        *vars(math),
        *(name for name in vars(Symbol) if not name.startswith("_")),
        *(str(dtype).removeprefix("torch.") for dtype in DTYPE_NAMES),
        *"nn functional special linalg Tensor and_ or_ finfo iinfo pi inf nan".split(),
        "promote_types",
    ]
)
"""Attribute names that read nothing which can change between calls."""

_TOO_MUCH = ("IMPORT_NAME", "STORE_GLOBAL", "DELETE_GLOBAL", "PUSH_EXC_INFO", "SETUP_FINALLY")
"""Instructions of imports, stores to globals and exception handlers: a handler would let a mod ask
whether a tensor has an attribute."""

_ABSENT, _END = object(), object()


class _Uncacheable(Exception):
    pass


def _outer_names(code: types.CodeType) -> tuple[str, ...] | None:
    """Return every name that `code` reads from outside of its locals and cells, or None if it may
    read or change more than a key can cover."""
    import dis

    names: dict[str, None] = {}
    stack = [code]
    while stack:
        current = stack.pop()
        for instruction in dis.get_instructions(current):
            if instruction.opname in _TOO_MUCH:
                return None
            if instruction.opname == "STORE_DEREF" and instruction.argval in code.co_freevars:
                return None
        names.update(dict.fromkeys(current.co_names))
        stack.extend(c for c in current.co_consts if isinstance(c, types.CodeType))
    return tuple(names)


_UNKNOWN = ("",)
_names_of_code: dict[types.CodeType, tuple[str, ...] | None] = {}


class _Reader:
    """Collects the key and the tensors of one function, in a fixed order."""

    __slots__ = ("functions", "key", "tensors")

    def __init__(self) -> None:
        self.key: list[Any] = []
        self.tensors: list[Tensor] = []
        self.functions: list[types.FunctionType] = []

    def function(self, function: types.FunctionType) -> None:
        key = self.key
        code = function.__code__
        key.append(code)
        for i, known in enumerate(self.functions):
            if known is function:  # already in the key; which one, since they may share their code
                key.append(i)
                return
        self.functions.append(function)
        if function.__dict__:
            raise _Uncacheable
        closure = function.__closure__
        if closure is not None:
            for cell in closure:
                try:
                    value = cell.cell_contents
                except ValueError:  # not assigned yet
                    key.append(_ABSENT)
                    continue
                self.value(value)
        defaults = function.__defaults__
        if defaults is not None:
            for value in defaults:
                self.value(value)
        key.append(_END)  # code tells how many cells there are, but not how many defaults
        if function.__kwdefaults__:
            for name, value in function.__kwdefaults__.items():
                key.append(name)
                self.value(value)
        names = _names_of_code.get(code, _UNKNOWN)
        if names is _UNKNOWN:
            if len(_names_of_code) > 4 * CACHE_SIZE:
                _names_of_code.clear()
            names = _names_of_code[code] = _outer_names(code)
        if names is None:
            raise _Uncacheable
        global_values = function.__globals__
        for name in names:
            value = global_values.get(name, _ABSENT)
            if value is not _ABSENT:
                key.append(name)
                self.value(value)
            elif name not in _ATTRIBUTES and name not in _BUILTINS:
                raise _Uncacheable

    def value(self, value: Any) -> None:
        kind = type(value)
        key = self.key
        if kind is Tensor or kind is Parameter:
            tensors = self.tensors
            for i, known in enumerate(tensors):
                if known is value:
                    key.append(i)
                    return
            tensors.append(value)
            key.append((value.dtype, value.dim(), value.requires_grad))
        elif kind is int or kind is str or kind is bool or value is None:
            key.append(kind)  # 1, 1.0 and True are equal
            key.append(value)
        elif kind is float:
            key.append(float)
            key.append(value if value else math.copysign(1.0, value))  # 0.0 and -0.0 are equal
            key.append(not value)
        elif kind is types.FunctionType:
            self.function(value)
        elif kind is types.ModuleType:
            if id(value) not in _MODULES:
                raise _Uncacheable
            key.append(value)
        elif kind is tuple:
            key.append(len(value))
            for item in value:
                self.value(item)
            key.append(tuple)
        elif kind is functools.partial:
            self.partial(value)
        elif kind is types.BuiltinFunctionType:
            if value.__self__ is not None and id(value.__self__) not in _MODULES:
                raise _Uncacheable
            key.append(value)
        elif kind is torch.dtype or kind is torch.device:
            key.append(value)
        else:
            raise _Uncacheable

    def reads_attributes(self) -> bool:
        """Whether a function may read an attribute that somebody gave to a tensor. One that is
        given later changes nothing: the trace would have failed without it."""
        given = {name for tensor in self.tensors for name in tensor.__dict__}
        return bool(given) and any(
            given.intersection(_names_of_code.get(function.__code__) or given)
            for function in self.functions
        )

    def partial(self, value: Any) -> None:
        self.key.append(functools.partial)
        self.value(value.func)
        self.value(value.args)
        for name, item in value.keywords.items():
            self.key.append(name)
            self.value(item)
        self.key.append(functools.partial)
        if vars(value):
            raise _Uncacheable


_entries: dict[tuple[Any, ...], tuple[TracedMod, list[int], list[torch.Size] | None]] = {}
"""Key -> a trace without its tensors, where these are among those that the reader finds anew at
each call, and the sizes that all of those must have, or None where they don't matter."""
_lock = threading.Lock()
free_in_child(sys.modules[__name__])


def traced(
    function: Callable[..., Any],
    kind: Literal["score", "mask"],
    score_dtype: torch.dtype,
    device: torch.device,
) -> TracedMod:
    """Return `trace_mod(function, ...)`, from the cache where it is certain to be the same."""
    reader = _Reader()
    try:
        if type(function) is types.FunctionType:
            reader.function(function)
        else:
            reader.value(function)
    except (_Uncacheable, RecursionError):  # the reader follows functions into each other
        trace = trace_mod(function, kind, score_dtype, device)
        # Here a call runs on values: nobody is left to hand over a symbolic number to.
        trace.ints = [int(number) for number in trace.ints]
        trace.floats = [float(number) for number in trace.floats]
        return trace
    # A trace has no_grad inside of the mod only where gradients are recorded outside of it.
    reader.key += (
        kind, score_dtype, device, torch.get_default_dtype(), torch.is_grad_enabled()
    )  # fmt: skip
    key = tuple(reader.key)
    entry = _entries.get(key)
    tensors = reader.tensors
    if entry is not None:
        kept, positions, sizes = entry
        if sizes is None or sizes == [tensor.shape for tensor in tensors]:
            captured = list(map(tensors.__getitem__, positions))
            return TracedMod(kept.text, captured, kept.ints, kept.floats, kept.names)
    trace = trace_mod(function, kind, score_dtype, device)
    positions = []
    for tensor in trace.captured:
        position = next((i for i, known in enumerate(tensors) if known is tensor), None)
        if position is None:
            return trace  # made inside the mod, from what it captured
        positions.append(position)
    if not trace.depends_on_facts and not reader.reads_attributes():
        with _lock:
            if len(_entries) >= CACHE_SIZE:
                del _entries[next(iter(_entries))]
            sizes = [tensor.shape for tensor in tensors] if trace.depends_on_sizes else None
            _entries[key] = (dataclasses.replace(trace, captured=[]), positions, sizes)
    return trace
