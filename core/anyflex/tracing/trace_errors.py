"""Refusals of what a mod may not do: ModTraceError with the user's line and the cure."""

from __future__ import annotations

import os
import sys
import types
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from anyflex.process.user_frames import user_location
from anyflex.tensors.dynamo_errors import fail
from anyflex.tensors.torch_versions import dynamo_constant, is_mutable
from anyflex.tracing.custom_functions import in_custom_function

__all__ = [
    "BRANCH",
    "CUSTOM_FUNCTION",
    "NUMPY",
    "PLAIN_REFUSED",
    "READS",
    "REFUSED",
    "TRANSFORM",
    "branch_hint",
    "change_in_place",
    "function_name",
    "refuse",
    "refuse_custom_function",
    "refuse_function",
    "refuse_index",
    "torch_function",
]

OpOverload, OpOverloadPacket = type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)
_TRACE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "trace.py")


def refuse(problem: str, operation: str, hint: str = "", pure: bool = False) -> NoReturn:
    """Raise ModTraceError, with the user's source line where frames can be inspected."""
    refuse_custom_function()
    _refuse(problem, operation, hint, pure)


def refuse_custom_function() -> None:
    """Raise ModTraceError in a custom ``autograd.Function`` that a mod under trace applies."""
    # `anyflex.tracing.dynamo_symbols` refuses it while Dynamo traces.
    if torch.compiler.is_dynamo_compiling() or not in_custom_function():
        return
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "trace_mod" and code.co_filename == _TRACE:
            # Nothing tells a Function in inference mode from inference mode alone.
            mode = torch.is_inference_mode_enabled()
            _refuse(*(INFERENCE_MODE if mode else CUSTOM_FUNCTION), pure=True)
        frame = frame.f_back


def _refuse(problem: str, operation: str, hint: str, pure: bool) -> NoReturn:
    file, line = (None, None) if torch.compiler.is_dynamo_compiling() else user_location()
    fail(
        "ModTraceError",
        problem,
        operation=operation,
        hint=hint,
        file=file,
        line=line,
        pure=pure,
    )


def refuse_index(problem: str, hint: str = "") -> NoReturn:
    """Raise ModIndexError, with the user's source line where frames can be inspected."""
    file, line = (None, None) if torch.compiler.is_dynamo_compiling() else user_location()
    fail("ModIndexError", problem, operation="indexing", hint=hint, file=file, line=line)


BRANCH = "a Python branch on a symbol (if, and, or, not, a chained comparison, while, assert)"
BRANCH_HINT = (
    "Use torch.where for `if`; `&`, `|`, `~` with parentheses for `and`, `or`, `not`; "
    "`(a <= x) & (x < b)` for a chained comparison; torch.minimum, torch.maximum or torch.clamp "
    "for min and max."
)
MIN_MAX_HINT = (
    "Python's min() and max() compare and branch: use torch.minimum, torch.maximum or torch.clamp."
)
NUMPY = (
    "NumPy on a symbol: a NumPy function of one, or a NumPy array indexed by one",
    "numpy",
    "Use torch's function, as torch.tanh for numpy.tanh, and capture torch.from_numpy(table) "
    "instead of a NumPy table.",
)
"""(problem, operation, cure)."""
CUSTOM_FUNCTION = (
    "a torch.autograd.Function in a mod",
    "torch.autograd.Function",
    "Write its forward as the mod, with x.detach() where no gradient is to pass: a straight-"
    "through estimator is `x + (torch.round(x) - x).detach()`.",
)
INFERENCE_MODE = (
    "torch.inference_mode, or a torch.autograd.Function under it, in a mod",
    "torch.inference_mode",
    "Use torch.no_grad(), or `.detach()`.",
)

TRANSFORM = (
    "a transform (vmap, grad, jvp) inside a mod",
    "torch.func",
    "A mod computes one score from scalars: transform tensors outside of it.",
)


def branch_hint() -> str:
    """Return the cure for a branch, from the user's line where it can be read."""
    if torch.compiler.is_dynamo_compiling():
        return BRANCH_HINT
    import linecache

    file, line = user_location()
    text = linecache.getline(file, line) if file is not None and line is not None else ""
    if "min(" in text or "max(" in text:
        return MIN_MAX_HINT
    return BRANCH_HINT


_ADVICE: dict[str, tuple[str, str]] = {
    # kind -> (what it is, cure)
    "random": ("a random number in a mod", "Read a captured table of random numbers instead."),
    "value": ("reading a value while tracing", "A symbol has no value yet; use torch.where."),
    "reduction": (
        "a reduction in a mod",
        "A mod computes one score from scalars: compute sums, means and softmaxes of captured "
        "tensors outside of it.",
    ),
    "gather": ("a gathering function in a mod", "Index the tensor: `table[k]`, `table[k, j]`."),
    "search": ("a search in a mod", "Compute a table outside and index it."),
    "shape": ("a change of shape in a mod", "A mod computes a scalar: drop it."),
    "complex": ("a complex number in a mod", "Scores are real."),
    "device": ("moving to a device in a mod", "Move captured tensors before the call."),
    "autograd": ("autograd inside a mod", "Call it outside; `.detach()` stops a gradient."),
    "many": ("a function with more than one result in a mod", "Compute it outside."),
    "new": (
        "a new tensor made from a symbol",
        "Use the symbol itself; sizes are Python numbers, and of a captured torch.arange(n) an "
        "element can be read.",
    ),
    "python bool": (
        "a function that returns a Python bool in a mod",
        "Use `==` or torch.isclose, which return a symbol.",
    ),
    "dynamic": ("a result whose shape depends on data in a mod", "Compute it outside."),
}

_NAMES: dict[str, str] = {
    "random": "rand randn randint randperm normal bernoulli multinomial poisson rand_like "
    "randn_like randint_like dropout alpha_dropout feature_dropout feature_alpha_dropout rrelu "
    "dropout1d dropout2d dropout3d gumbel_softmax",
    "value": "item tolist numpy __bool__ __int__ __float__ __index__ __array__ __complex__",
    "reduction": "sum mean prod std var median nanmedian mode norm logsumexp softmax log_softmax "
    "cumsum cumprod cummax cummin logcumsumexp all any amax amin argmax argmin aminmax nansum "
    "nanmean sort argsort topk kthvalue count_nonzero softmin normalize matmul mm bmm dot mv "
    "einsum inner outer __matmul__ __rmatmul__ batch_norm instance_norm native_batch_norm "
    "cudnn_batch_norm miopen_batch_norm batch_norm_update_stats _batch_norm_impl_index "
    "_native_batch_norm_legit",
    "gather": "gather index_select take take_along_dim embedding masked_select index_put "
    "index_add scatter scatter_add index_fill embedding_bag one_hot",
    "search": "searchsorted bucketize histc bincount isin unique unique_consecutive",
    "shape": "unsqueeze view reshape expand repeat flatten ravel stack cat concat concatenate "
    "hstack vstack view_as expand_as broadcast_to tile atleast_1d atleast_2d atleast_3d squeeze",
    "complex": "complex polar view_as_complex view_as_real angle real imag",
    "device": "cuda cpu xpu mps",
    "autograd": "requires_grad_ backward retain_grad register_hook",
    "new": "tensor scalar_tensor full zeros ones empty eye arange range empty_like "
    "empty_strided empty_permuted new_empty new_empty_strided tril_indices triu_indices "
    "bartlett_window blackman_window hamming_window hann_window kaiser_window",
    "many": "frexp split chunk unbind tensor_split modf",
    "python bool": "equal allclose",
    "dynamic": "nonzero argwhere",
}


def _refused() -> dict[Any, tuple[str, str, str]]:
    table: dict[Any, tuple[str, str, str]] = {}
    spaces = ((torch, "torch."), (Tensor, "Tensor."), (F, "torch.nn.functional."))
    for kind, names in _NAMES.items():
        problem, hint = _ADVICE[kind]
        for name in names.split():
            for space, prefix in spaces:
                function = getattr(space, name, None)
                if callable(function):  # Tensor.real is a descriptor, which Dynamo can't hash
                    table[function] = (f"{problem}: {prefix}{name}", prefix + name, hint)
    for name in dir(Tensor):
        in_place = name.endswith("_") and not name.endswith("__") and not name.startswith("_")
        assigns = name in (
            "__setitem__",
            "set_",
            "__iadd__",
            "__isub__",
            "__imul__",
            "__itruediv__",
        )
        if (in_place and name != "requires_grad_") or assigns:
            cure = f"`.{name[:-1]}`" if in_place else "a new value"
            table[getattr(Tensor, name)] = (
                f"a change in place in a mod: Tensor.{name}",
                f"Tensor.{name}",
                f"Mods are pure: use {cure} instead.",
            )
    return table


REFUSED = _refused()
"""Function -> (problem, operation, cure)."""

_ON_ROWS = tuple(_ADVICE[kind][0] for kind in ("reduction", "gather", "search", "shape", "many"))
_HARMLESS = tuple(_ADVICE[kind][0] for kind in ("shape", "many", "device", "new"))
PLAIN_REFUSED = {
    function: entry for function, entry in REFUSED.items() if not entry[0].startswith(_HARMLESS)
}
"""Refused functions of captured tensors alone: changes of shape are harmless there."""

READS = tuple(
    getattr(Tensor, name) for name in "item tolist __int__ __float__ __bool__ __index__".split()
)
"""Functions that give Python the values of a captured tensor."""

_WRITING = (
    "setitem delitem iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift "
    "irshift"
).split()
"""Python's names of what writes; methods have underscores around them."""
_NOT_WRITING = ("and_", "or_", "not_", "is_")
_PURE = "Mods are pure: use a new value instead."


# Dynamo doesn't know the names of methods, but can call this.
@dynamo_constant
def change_in_place(func: Any) -> tuple[str, str, str] | None:
    """Return (problem, operation, cure) for a torch function that writes to what it is given.

    torch's names tell: ``relu_``, ``aten.add_.Tensor``, ``__ior__``, the setter of ``.data``. Of
    an operator, a custom one too, its schema does.
    """
    name = (getattr(func, "__name__", None) or "").split(".")[0]
    if name in ("__set__", "__delete__"):
        name = "." + func.__self__.__name__
        return (f"a change in place in a mod: {name} is set", name, _PURE)
    ends = name[-1:] == "_" and name[-2:] != "__" and name not in _NOT_WRITING
    if ends or name.strip("_") in _WRITING:
        return (f"a change in place in a mod: {name}", name, _PURE)
    if isinstance(func, OpOverloadPacket):
        func = getattr(func, "default", None)
    if isinstance(func, OpOverload) and is_mutable(func):
        return (f"a change in place in a mod: {name}", name, _PURE)
    return None


def torch_function(func: Any) -> Any:
    """Return ``torch.tanh`` for ``torch.ops.aten.tanh`` and its overloads, which take the same
    arguments; anything else as it is."""
    name = _aten_name(func)
    return getattr(torch, name) if name else func


@dynamo_constant
def _aten_name(func: Any) -> str:
    """Return the name of a function of torch's that is an operator's binding, or ""."""
    if isinstance(func, (OpOverload, OpOverloadPacket)) and str(func).startswith("aten."):
        name = func.__name__.split(".")[0]
        if isinstance(getattr(torch, name, None), types.BuiltinFunctionType):
            return name
    return ""


def function_name(func: Any) -> str:
    """Return the name of a torch function for messages: ``.real`` of an attribute's getter."""
    name: str = getattr(func, "__name__", None) or "a function"
    return "." + func.__self__.__name__ if name == "__get__" else name


def refuse_function(func: Any, on_rows: bool = False) -> NoReturn:
    """Raise ModTraceError for a torch function that the tracer doesn't know or refuses.

    Args:
        on_rows: of rows of captured tensors, on which vmap runs what a symbol has no use for.
    """
    refused = REFUSED.get(func)
    if refused is None:
        refused = change_in_place(func)
    if refused is not None:
        refuse(*refused, pure=on_rows and refused[0].startswith(_ON_ROWS))
    name = function_name(func)
    refuse(
        f"torch operation {name} is not one that a mod graph can hold",
        name,
        "The reference backend runs it through vmap; to run on other backends, write it with "
        "the operations of the table in the documentation.",
        pure=True,
    )
