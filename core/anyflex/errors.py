"""Every exception and warning that anyflex raises.

AnyflexError
├── ArgumentError (ValueError)            a value, shape, device or combination of arguments
│   └── BlockMaskError                    building, converting or using a block mask
├── ArgumentTypeError (TypeError)         a wrong Python type or dtype
│   └── TensorFormError                   rank, layout or dtypes of query, key and value; an
│                                         ArgumentError and NotImplementedError too
├── ModTraceError (TypeError)             a mod that can't be traced
│   └── ModIndexError (IndexError)        a captured read that leaves its tensor
├── BackendRefused (NotImplementedError)  nobody, or not the forced backend, takes the call
├── PluginError (RuntimeError)            a plugin that is broken
│   └── BackendConflict                   two distributions under one backend name
├── GraphCaptureError (RuntimeError)      a graph capture that would compile, or freeze a seed
└── AllocationError (MemoryError, RuntimeError)  there is not enough memory for the call

PerformanceWarning (UserWarning)          the call works, slower than it could
"""

from __future__ import annotations

__all__ = [
    "AllocationError",
    "AnyflexError",
    "ArgumentError",
    "ArgumentTypeError",
    "BackendConflict",
    "BackendRefused",
    "BlockMaskError",
    "GraphCaptureError",
    "ModIndexError",
    "ModTraceError",
    "PerformanceWarning",
    "PluginError",
    "TensorFormError",
]


class AnyflexError(Exception):
    """Base of every error that anyflex raises on purpose."""


class ArgumentError(AnyflexError, ValueError):
    """A value, shape, device or combination of arguments that no backend could serve."""


class ArgumentTypeError(AnyflexError, TypeError):
    """An argument of a wrong Python type, or a tensor of a wrong dtype or layout."""


class TensorFormError(ArgumentError, ArgumentTypeError, NotImplementedError):
    """A rank or layout of query, key or value that isn't taken, or dtypes that differ.

    torch raises ValueError or NotImplementedError for these: this error is both.
    """


class BlockMaskError(ArgumentError):
    """A block mask that can't be built, converted, or used with these tensors."""


class ModTraceError(AnyflexError, TypeError):
    """A score or mask function that can't be turned into a mod graph.

    Attributes:
        operation: the operation that can't be traced: ``"torch.rand"``, ``"bool()"``.
        file, line: where in the user's source, or None where that is unknown
            (inside ``torch.compile``).
        hint: the cure, or the empty string.
        pure: True for an unknown but pure torch operation: the reference backend can run the
            mod all the same.
    """

    def __init__(
        self,
        problem: str,
        *,
        operation: str,
        hint: str = "",
        file: str | None = None,
        line: int | None = None,
        pure: bool = False,
    ) -> None:
        where = f" ({file}:{line})" if file is not None else ""
        super().__init__(f"{problem}{where}. {hint}" if hint else f"{problem}{where}")
        self.operation = operation
        self.hint = hint
        self.file = file
        self.line = line
        self.pure = pure


class ModIndexError(ModTraceError, IndexError):
    """A read of a captured tensor that certainly, or on the reference actually, leaves it."""


class BackendRefused(AnyflexError, NotImplementedError):
    """No backend takes the call, or the forced one doesn't.

    Attributes:
        reasons: backend name -> why it refused.
    """

    def __init__(self, message: str, reasons: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})


class PluginError(AnyflexError, RuntimeError):
    """A plugin that is broken; ``__cause__`` is what it raised.

    Attributes:
        plugin: the entry-point name, for example ``"cuda"``.
        distribution: ``"name version"`` of the distribution that carries it.
    """

    def __init__(self, message: str, *, plugin: str, distribution: str) -> None:
        super().__init__(message)
        self.plugin = plugin
        self.distribution = distribution


class BackendConflict(PluginError):
    """Two distributions register a backend under the same name, so neither is used by itself."""


class GraphCaptureError(AnyflexError, RuntimeError):
    """While a device graph is being captured, a kernel would have to be compiled, or weights be
    dropped."""


class AllocationError(AnyflexError, MemoryError, RuntimeError):
    """There is not enough memory for what the call returns or computes in. Also a RuntimeError,
    which is what torch raises on a CPU; an accelerator's ``torch.OutOfMemoryError`` stays that."""


class PerformanceWarning(UserWarning):
    """The call gives right results, on a slower path than another one that is available."""
