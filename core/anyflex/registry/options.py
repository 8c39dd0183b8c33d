"""The policy for ``kernel_options``.

A top-level key is one of torch's, or a backend's name with a dict of that backend's own options:
``{"BLOCK_M": 64, "cuda": {"pipeline": 3}}``. Everything else raises.

- torch's tuning keys are checked, used by a backend whose `Option` names them in ``torch_key``,
  and otherwise warned about once and listed as unused by ``explain``.
- Keys that change meaning are honoured or refused: a promise (ROWS_GUARANTEED_SAFE,
  BLOCKS_ARE_CONTIGUOUS) is honoured by every backend, because all are right without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from anyflex.contract.backend import Backend
from anyflex.contract.option import Option
from anyflex.errors import ArgumentError, ArgumentTypeError
from anyflex.registry.freeze_options import KernelOptions

__all__ = [
    "TORCH_KEYS",
    "ResolvedOptions",
    "TorchKey",
    "check_top_level",
    "option_rows",
    "resolve",
    "unknown_key",
]

Number = int | float | bool | str


@dataclass(frozen=True, slots=True)
class TorchKey:
    """One of torch's documented kernel options.

    Args:
        type: of the value.
        rule: the allowed values, in words.
        allows: whether a value of the right type keeps the rule.
        effect: ``tuning`` changes speed only; ``promise`` allows shortcuts; ``meaning`` changes
            what is computed or by whom.
        default: a value of a tuning key that asks for nothing.
    """

    type: type
    rule: str
    allows: Callable[[Any], bool] = lambda value: True
    effect: Literal["tuning", "promise", "meaning"] = "tuning"
    default: object = None


def _power_of_two(low: int, high: int) -> TorchKey:
    return TorchKey(
        int,
        f"a power of two from {low} to {high}",
        lambda value: low <= value <= high and value & (value - 1) == 0,
    )


def _at_least(least: int) -> TorchKey:
    return TorchKey(int, f"an int of at least {least}", lambda value: value >= least)


_TILE = _power_of_two(16, 1024)
_FLAG = TorchKey(bool, "True or False")
_PROMISE = TorchKey(bool, "True or False", effect="promise")

_BOTH_DIRECTIONS: dict[str, TorchKey] = {
    "num_warps": _power_of_two(1, 32),
    "num_stages": _at_least(1),
    "BLOCK_M": _TILE,
    "BLOCK_N": _TILE,
    "BLOCK_M1": _TILE,
    "BLOCK_N1": _TILE,
    "BLOCK_M2": _TILE,
    "BLOCK_N2": _TILE,
    "PRESCALE_QK": _FLAG,
    "ROWS_GUARANTEED_SAFE": _PROMISE,
    "BLOCKS_ARE_CONTIGUOUS": _PROMISE,
    "WRITE_DQ": _FLAG,
    "USE_TMA": _FLAG,
    "kpack": _at_least(1),
    "matrix_instr_nonkdim": _at_least(0),
    "waves_per_eu": _at_least(0),
    "SPLIT_KV": _at_least(1),
    "PARTITION_SIZE": _at_least(1),
    "num_consumer_groups": _at_least(0),
    "num_buffers_warp_spec": _at_least(0),
}

TORCH_KEYS: dict[str, TorchKey] = {
    **_BOTH_DIRECTIONS,
    **{f"fwd_{key}": rule for key, rule in _BOTH_DIRECTIONS.items()},
    **{f"bwd_{key}": rule for key, rule in _BOTH_DIRECTIONS.items()},
    "FORCE_USE_FLEX_ATTENTION": _FLAG,
    "BACKEND": TorchKey(
        str,
        "AUTO, TRITON, TRITON_DECODE or FLASH, torch's kernels, which compute the same; to choose "
        'a backend of anyflex use the argument backend=, for example backend="reference"',
        lambda value: value in ("AUTO", "TRITON", "TRITON_DECODE", "FLASH"),
        default="AUTO",
    ),
    "SKIP_MASK_SCORE": TorchKey(
        bool,
        "False: anyflex never leaves out the mods; call without them instead",
        lambda value: value is False,
        "meaning",
    ),
}
"""All keys that torch documents, and those that its kernels read besides."""

# torch's tile keys belong to one direction, so a prefix adds nothing.
_SAME_KEY = {f"fwd_BLOCK_{side}": f"BLOCK_{side}" for side in ("M", "N")} | {
    f"bwd_BLOCK_{side}": f"BLOCK_{side}" for side in ("M1", "N1", "M2", "N2")
}


@dataclass(frozen=True, slots=True)
class ResolvedOptions:
    """``kernel_options`` as one backend sees them.

    Args:
        values: the backend's own options that were given, by name, sorted: ``Spec.options``.
        unused: the keys that this backend doesn't use; ``"cuda.pipeline"`` for another
            backend's own.
        ignored_tuning: those of `unused` that are torch's tuning keys, to be warned about.
    """

    values: tuple[tuple[str, Number], ...]
    unused: tuple[str, ...]
    ignored_tuning: tuple[str, ...]


def check_top_level(kernel_options: KernelOptions, names: Iterable[str]) -> KernelOptions:
    """Check the part that doesn't depend on the backend; return the keys that are neither torch's
    nor a backend's name, so that the caller can find their owner (`unknown_key`).

    Args:
        kernel_options: from `freeze_options`.
        names: every backend name that is known, installed or not.
    """
    known = set(names)
    unknown = []
    for key, value in kernel_options:
        rule = TORCH_KEYS.get(key)
        if rule is not None:
            _check_torch_key(key, value, rule)
        elif key not in known:
            unknown.append((key, value))
        elif not isinstance(value, tuple):
            raise ArgumentTypeError(
                f"kernel_options[{key!r}] must be a dict with the own options of backend {key!r}, "
                f"got {value!r}"
            )
    return tuple(unknown)


def _check_torch_key(key: str, value: object, rule: TorchKey) -> None:
    right = isinstance(value, rule.type) and (rule.type is bool or not isinstance(value, bool))
    if not right:
        shown = "a dict" if isinstance(value, tuple) else f"{value!r} ({type(value).__name__})"
        raise ArgumentTypeError(f"kernel_options[{key!r}] must be {rule.rule}; got {shown}")
    if not rule.allows(value):
        raise ArgumentError(f"kernel_options[{key!r}] must be {rule.rule}; got {value!r}")


def unknown_key(key: str, backends: Mapping[str, Backend], names: Iterable[str]) -> ArgumentError:
    """Return the error for a top-level key that nobody knows, with the nearest name and its owner.

    Args:
        key: the key.
        backends: the backends that could be loaded, by name.
        names: every backend name that is known.
    """
    owners = sorted(name for name, backend in backends.items() if key in backend.options)
    if owners:
        return ArgumentError(
            f"kernel_options[{key!r}]: it is an own option of backend {' and '.join(owners)}; "
            f"write kernel_options={{{owners[0]!r}: {{{key!r}: ...}}}}"
        )
    return ArgumentError(
        f"kernel_options[{key!r}]: no such option; " + _nearest(key, backends, sorted(names))
    )


def _nearest(key: str, backends: Mapping[str, Backend], names: Iterable[str]) -> str:
    import difflib

    owner_of = dict.fromkeys(names, "a backend's name")
    owner_of |= {
        option: f"an own option of backend {name}"
        for name, backend in backends.items()
        for option in backend.options
    }
    owner_of |= dict.fromkeys(TORCH_KEYS, "one of torch's keys")
    lower = {known.lower(): known for known in owner_of}
    near = difflib.get_close_matches(key.lower(), lower, n=1)
    if near:
        known = lower[near[0]]
        return f"the nearest is {known!r}, {owner_of[known]}"
    return (
        f"there are torch's keys ({', '.join(sorted(_BOTH_DIRECTIONS))}) and a backend's own, "
        f"nested by its name ({', '.join(names)})"
    )


def resolve(
    kernel_options: KernelOptions, backend: Backend, others: Mapping[str, Backend]
) -> ResolvedOptions:
    """Return the options as `backend` sees them.

    Args:
        kernel_options: from `freeze_options`, through `check_top_level`.
        backend: the one that would compute.
        others: backends that are loaded, by name, to say whose an unknown key is.

    Raises:
        ArgumentError, ArgumentTypeError: an own option of this backend is unknown or has a wrong
            value, or is given twice with different values.
    """
    by_torch_key = {
        option.torch_key: name
        for name, option in backend.options.items()
        if option.torch_key is not None
    }
    values: dict[str, Number] = {}
    given_as: dict[str, str] = {}
    unused: list[str] = []
    tuning: list[str] = []

    def take(name: str, value: object, shown: str) -> None:
        checked = _checked(backend.options[name], value, shown, backend.name)
        if name in values and values[name] != checked:
            raise ArgumentError(
                f"{shown}={checked!r} contradicts {given_as[name]}={values[name]!r}: they are the "
                f"same option {name!r} of backend {backend.name}; keep one"
            )
        values[name], given_as[name] = checked, shown

    for key, value in kernel_options:
        rule = TORCH_KEYS.get(key)
        if rule is None:
            assert isinstance(value, tuple)
            for own, own_value in value:
                shown = f"kernel_options[{key!r}][{own!r}]"
                if key != backend.name:
                    unused.append(f"{key}.{own}")
                elif own not in backend.options:
                    raise _unknown_own(own, backend, others)
                else:
                    take(own, own_value, shown)
            continue
        name = by_torch_key.get(key) or by_torch_key.get(_SAME_KEY.get(key, key))
        if name is not None:
            take(name, value, f"kernel_options[{key!r}]")
        elif rule.effect == "tuning" and value != rule.default:
            unused.append(key)
            tuning.append(key)
    return ResolvedOptions(tuple(sorted(values.items())), tuple(unused), tuple(tuning))


def _unknown_own(key: str, backend: Backend, others: Mapping[str, Backend]) -> ArgumentError:
    where = f"kernel_options[{backend.name!r}][{key!r}]"
    owners = sorted(name for name, other in others.items() if key in other.options)
    if owners:
        return ArgumentError(f"{where}: it is an option of backend {' and '.join(owners)}")
    if key in TORCH_KEYS:
        return ArgumentError(
            f"{where}: it is one of torch's keys; write it at the top level of kernel_options"
        )
    if not backend.options:
        return ArgumentError(f"{where}: backend {backend.name} has no options of its own")
    import difflib

    near = difflib.get_close_matches(key, backend.options, n=1, cutoff=0.0)
    return ArgumentError(
        f"{where}: no such option; the nearest is {near[0]!r}; backend {backend.name} has: "
        f"{', '.join(sorted(backend.options))}"
    )


def _checked(option: Option, value: object, shown: str, owner: str) -> Number:
    """Return the value in the option's type. An int is accepted for a float, a bool only for a
    bool."""
    if option.type is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    right = isinstance(value, option.type) and (option.type is bool or not isinstance(value, bool))
    allowed = f" out of {', '.join(map(repr, option.choices))}" if option.choices else ""
    if not right:
        raise ArgumentTypeError(
            f"{shown} must be of type {option.type.__name__}{allowed} for backend {owner}; got "
            f"{value!r} ({type(value).__name__})"
        )
    assert isinstance(value, (bool, int, float, str))
    if option.choices and value not in option.choices:
        raise ArgumentError(f"{shown} must be one{allowed} for backend {owner}; got {value!r}")
    return value


def option_rows(backend: Backend) -> list[dict[str, object]]:
    """Return a backend's options as plain data, for ``anyflex doctor``."""
    return [
        {"name": name, **dataclasses.asdict(option), "type": option.type.__name__}
        for name, option in sorted(backend.options.items())
    ]
