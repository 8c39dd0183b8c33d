"""Tracing: a score or mask function becomes a mod graph's text and what it captured."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from anyflex.errors import ArgumentTypeError, ModTraceError
from anyflex.mod_graph.dtypes import DTYPE_NAMES
from anyflex.tensors.dynamo_errors import fail
from anyflex.tensors.symbolic_numbers import NUMBERS
from anyflex.tensors.torch_versions import functorch_level
from anyflex.tracing.conversions import FACTORIES
from anyflex.tracing.custom_functions import in_custom_function, outside_of_functions
from anyflex.tracing.dynamo_symbols import register_symbols
from anyflex.tracing.eager_tracing import call_mod, codes_of
from anyflex.tracing.rows import ONE_ELEMENT, PartialRead, Row
from anyflex.tracing.symbol import (
    Symbol,
    dispatch,
    find_tracer,
    refuse_out,
    spell,
)
from anyflex.tracing.tensor_symbol import tensor_symbol
from anyflex.tracing.torch_functions import SPELLINGS
from anyflex.tracing.trace_errors import (
    PLAIN_REFUSED,
    READS,
    change_in_place,
    refuse,
    refuse_index,
    torch_function,
)
from anyflex.tracing.tracer import Tracer

__all__ = ["TracedMod", "captured_name", "check_signature", "mod_kind", "trace_mod"]

INDICES = ("b", "h", "q_idx", "kv_idx")


@dataclass(slots=True, eq=False)
class TracedMod:
    """A traced mod as plain data.

    Args:
        text: the raw graph; `anyflex.mod_graph.graph.parse_graph` reads it.
        captured: tensors that the graph's loads count into.
        ints, floats: values of its number slots, in order of appearance.
        names: the captured tensors' names in the user's function, "" where unknown.
        depends_on_facts: the mod asked for a captured tensor's shape or type, or made a new
            tensor from it: it must be traced again at each call.
        depends_on_sizes: the graph holds for captured tensors of these sizes alone.
    """

    text: str
    captured: list[Tensor]
    ints: list[int]
    floats: list[float]
    names: list[str]
    depends_on_facts: bool = False
    depends_on_sizes: bool = False


class TraceMode(TorchFunctionMode):
    """Catches calls whose first operand is a plain tensor, and watches what a mod does with plain
    tensors alone."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        try:
            if find_tracer(args) is not None or find_tracer(tuple(kwargs.values())) is not None:
                return dispatch(self.tracer, func, args, kwargs)
            return on_plain_tensors(self.tracer, func, args, kwargs)
        except ModTraceError as error:
            # torch takes a TypeError of `table += 1` for "not my operand", and goes on.
            self.tracer.refused = error
            raise


def on_plain_tensors(
    tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A torch function inside a mod that no symbol takes part in."""
    make = FACTORIES.get(func)
    if make is not None:
        made = make(tracer, *args, **kwargs)
        if made is not NotImplemented:
            return made
    refuse_out(kwargs)
    refused = None
    # An eager trace that reads a value is made anew at each call; a compiled one would keep it.
    if func not in READS or torch.compiler.is_dynamo_compiling():
        refused = PLAIN_REFUSED.get(torch_function(func))
    if refused is None:
        refused = change_in_place(func)
    if refused is not None:
        on = ""
        if args and isinstance(args[0], Tensor):
            on = f", on {tracer.describe(args[0])}"
        refuse(refused[0] + on, refused[1], refused[2])
    if kwargs.get("inplace"):
        refuse("a change in place in a mod: inplace=True", "inplace", "Leave `inplace` out.")
    tracer.refuse_transform()
    spelling = SPELLINGS.get(func)
    if spelling is not None:
        scalars = 0
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                scalars += 1 if value.dim() == 0 else -1000
        if scalars > 0:  # a function of captured 0-d tensors belongs to the graph
            return spell(tracer, spelling, args, kwargs)
    tracer.read_facts = True
    try:
        return func(*args, **kwargs)
    except IndexError as error:
        if func is not Tensor.__getitem__:
            raise
        refuse_index(
            f"a mod reads {tracer.describe(args[0])} outside of it: {error}",
            "Keep it within -N..N-1.",
        )


def trace_mod(
    function: Callable[..., Any],
    kind: Literal["score", "mask"],
    score_dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> TracedMod:
    """Call `function` once on symbols and return what it did.

    Raises:
        ModTraceError: it can't be a mod graph; ``.pure`` tells whether vmap could run it.
        BlockMaskError: a mask function whose result is not a bool scalar.
        Whatever `function` itself raises.
    """
    compiling = torch.compiler.is_dynamo_compiling()
    if not compiling and in_custom_function():
        with outside_of_functions():
            return trace_mod(function, kind, score_dtype, device)
    tracer = Tracer(
        DTYPE_NAMES[torch.get_default_dtype()],
        device if device is not None else torch.device("cpu"),
    )
    check_signature(function, kind)
    if compiling:
        register_symbols(TraceMode)
    else:
        tracer.name_of = lambda tensor: captured_name(function, tensor)
        tracer.make_symbol = tensor_symbol
        tracer.transform_level = functorch_level
        tracer.in_custom_function = in_custom_function
    symbols = [tracer.add("input", "i64", "-", name) for name in INDICES]
    if kind == "score":
        tracer.records_gradients = torch.is_grad_enabled()
        score = tracer.add("input", DTYPE_NAMES[score_dtype], "-", "score")
        symbols = [score, *symbols]
    with TraceMode(tracer):
        result = function(*symbols) if compiling else call_mod(function, symbols)
    if tracer.refused is not None:
        raise tracer.refused
    if kind == "score":
        output = _score_result(tracer, result, symbols[0].kind, function)
    else:
        output = _mask_result(tracer, result)
    return TracedMod(
        tracer.text(output),
        tracer.captured,
        tracer.ints,
        tracer.floats,
        ["" if compiling else captured_name(function, tensor) for tensor in tracer.captured],
        tracer.read_facts,
        tracer.read_sizes,
    )


def _score_result(tracer: Tracer, result: Any, kind: str, function: Any) -> Symbol:
    if result is None:
        refuse("a score mod that returns None", "return", "Did you forget `return`?")
    if isinstance(result, (PartialRead, Row)):
        known = isinstance(function, types.FunctionType)
        fail(
            "ModTraceError",
            result.problem(),
            operation="return",
            hint=ONE_ELEMENT,
            file=function.__code__.co_filename if known else None,
            line=function.__code__.co_firstlineno if known else None,
        )
    if isinstance(result, Tensor) and result.dim() > 0:
        refuse(
            f"a score mod that returns a tensor of shape {list(result.shape)}",
            "return",
            "It returns one scalar: index every dimension of the captured tensor.",
        )
    if not isinstance(result, (Symbol, Tensor, *NUMBERS)):
        refuse(
            f"a score mod that returns a {type(result).__name__}",
            "return",
            "It returns one real score.",
        )
    output = tracer.symbol(result)
    if output.kind == "bool":
        refuse(
            "a score mod that returns a bool",
            "return",
            "A mask goes through create_block_mask(mask_mod, ...) and block_mask=; to drop single "
            "scores, use torch.where(condition, score, float('-inf')).",
        )
    return tracer.as_kind(output, kind)


def _mask_result(tracer: Tracer, result: Any) -> Symbol:
    if isinstance(result, (PartialRead, Row)) or (isinstance(result, Tensor) and result.dim() > 0):
        shape = result.shape_left() if isinstance(result, PartialRead) else list(result.shape)
        fail(
            "BlockMaskError",
            f"mask_mod returned something of shape {shape}; it must return one bool scalar. Index "
            "every dimension of the captured tensor.",
        )
    if not isinstance(result, (Symbol, Tensor, bool)):
        fail(
            "BlockMaskError",
            f"mask_mod returned a {type(result).__name__}; it must return one bool scalar. "
            "Compare (`!= 0`), and don't forget `return`.",
        )
    output = tracer.symbol(result)
    if output.kind != "bool":
        fail(
            "BlockMaskError",
            f"mask_mod returned dtype {output.dtype}; it must return bool. Use `!= 0`.",
        )
    return output


def mod_kind(function: Any, argument: str = "mod") -> Literal["score", "mask"]:
    """Tell a score mod (5 positional arguments) from a mask mod (4).

    Raises:
        ArgumentTypeError: `function` is not a plain callable.
        ModTraceError: it takes another number of arguments.
    """
    count = positional_count(function, argument)
    if count == 5:
        return "score"
    if count == 4:
        return "mask"
    raise ModTraceError(
        f"{argument} takes {'any number of' if count is None else count} positional arguments",
        operation="signature",
        hint="A score mod is f(score, b, h, q_idx, kv_idx), a mask mod f(b, h, q_idx, kv_idx).",
    )


VARIADIC = 0x04
ASYNC_OR_GENERATOR = 0x20 | 0x80 | 0x200
"""Flags of a code object, as `inspect` names them."""

WANTED = {
    "score": (5, "score_mod", "f(score, b, h, q_idx, kv_idx)"),
    "mask": (4, "mask_mod", "f(b, h, q_idx, kv_idx)"),
}


def check_signature(function: Any, kind: Literal["score", "mask"], argument: str = "") -> None:
    """Check that `function` can be called as a mod of this kind; Dynamo follows it.

    Args:
        argument: how messages name it, by default ``"score_mod"`` or ``"mask_mod"``.

    Raises:
        ArgumentTypeError: it is not a plain function.
        ModTraceError, BlockMaskError: a score, or mask, function with other arguments.
    """
    wanted, name, signature = WANTED[kind]
    argument = argument or name
    if isinstance(function, types.FunctionType):
        code = function.__code__
        if code.co_flags & ASYNC_OR_GENERATOR:
            fail("ArgumentTypeError", f"{argument} must be a plain function, got {function}")
        if code.co_flags & VARIADIC:
            return
        defaults = function.__defaults__
        most = code.co_argcount
        least = most - (0 if defaults is None else len(defaults))
        if least <= wanted <= most:
            return
        count: int | None = least
    elif torch.compiler.is_dynamo_compiling():
        return
    else:
        count = positional_count(function, argument)
        if count is None or count == wanted:
            return
    problem = (
        f"{argument} takes {count} positional arguments; it is called as {signature}, with "
        f"{wanted}"
    )
    if kind == "mask":
        fail("BlockMaskError", problem)
    fail(
        "ModTraceError",
        problem,
        operation="signature",
        hint="A mask function takes 4, (b, h, q_idx, kv_idx), and goes through create_block_mask.",
    )


def captured_name(function: Any, tensor: Tensor) -> str:
    """Return the name under which `function` knows a captured tensor, or ""."""
    while isinstance(function, functools.partial):
        function = function.func
    if not isinstance(function, types.FunctionType):
        return ""
    code = function.__code__
    for part in codes_of(code):
        for name in part.co_names:
            if function.__globals__.get(name) is tensor:
                return name
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            if cell.cell_contents is tensor:
                return name
        except ValueError:  # a cell that is not assigned yet holds nothing to name
            continue
    return ""


def positional_count(function: Any, argument: str) -> int | None:
    """Number of positional arguments without defaults; None where it can't be known (*args)."""
    import inspect

    if not callable(function):
        raise ArgumentTypeError(f"{argument} must be a function, got {type(function).__name__}")
    if isinstance(function, torch.nn.Module):  # whose __call__ takes any arguments
        function = function.forward
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise ArgumentTypeError(f"{argument} must be a plain function, got {function!r}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions have no signature
        return None
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return None
    return sum(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
        for p in parameters
    )
