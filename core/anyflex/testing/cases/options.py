"""kernel_options: a backend's own options do what they say, unknown ones are refused by name."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Mapping
from typing import Any

import anyflex
from anyflex.errors import ArgumentError, ArgumentTypeError
from anyflex.plugin import Option
from anyflex.testing.case_types import Group
from anyflex.testing.checking import compare, plain, with_options
from anyflex.testing.session import Session

__all__ = ["CASES"]

CASES = Group("options")


def _refused(session: Session, options: dict[str, object]) -> str:
    """Return the message of the refusal of these options; fail the case if there is none."""
    tensors: Mapping[str, Any] = plain(session, "options").draw(session.device).tensors
    try:
        anyflex.flex_attention(
            **tensors, kernel_options={session.name: options}, backend=session.name
        )
    except (ArgumentError, ArgumentTypeError) as error:
        return str(error)
    session.require(False, f"kernel_options {options} were accepted")
    return ""


@CASES.behaviour()
def unknown(session: Session) -> None:
    """An option that isn't declared is refused, with the nearest name."""
    _refused(session, {"NO_SUCH_KEY": 1})
    for name in session.backend.options:
        message = _refused(session, {name + "x": 1})
        nearest = difflib.get_close_matches(name + "x", session.backend.options, n=1)[0]
        session.require(
            repr(nearest) in message, f"the refusal of {name}x doesn't name {nearest}: {message}"
        )


@CASES.behaviour()
def wrong_type(session: Session) -> None:
    """A value of another type, or out of the choices, is refused."""
    for name, option in session.backend.options.items():
        wrong: list[object] = [b"bytes", None]
        if option.type is not str:
            wrong.append("text")
        if option.choices and option.type is int:
            wrong.append(max(int(choice) for choice in option.choices) + 1)
        for value in wrong:
            _refused(session, {name: value})
    session.needs(session.backend.options, "no options are declared")


def _values(option: Option) -> list[object]:
    """Every value that the option declares; its default, or nothing, where it declares none."""
    if option.choices:
        return [*option.choices]
    if option.type is bool:
        return [False, True]
    return [] if option.default is None else [option.default]


@CASES.behaviour()
def choices(session: Session) -> None:
    """Every declared choice of every option computes the same attention or is refused by name, and
    some choice of each is accepted."""
    session.needs(session.backend.options, "no options are declared")
    case = plain(session, "choices", q_length=70, kv_length=150)
    for name, option in session.backend.options.items():
        session.require(
            option.default is None or isinstance(option.default, option.type),
            f"the default of option {name} is {option.default!r}, no {option.type.__name__}",
        )
        session.require(
            option.default is None or not option.choices or option.default in option.choices,
            f"the default of option {name}, {option.default!r}, is none of its choices",
        )
        accepted, refusal = False, ""
        for value in _values(option):
            attention = with_options({session.name: {name: value}})
            try:
                compare(session, case, attention=attention)
            except ArgumentError as error:
                # This device, or a call of this dtype, may not have what the value needs.
                refusal = str(error)
                session.require(
                    name in refusal, f"the refusal of {name}={value!r} doesn't name it: {refusal}"
                )
                continue
            accepted = True
            session.require(
                (name, value) in session.journal.forwards[-1].options,
                f"option {name}={value!r} did not arrive in spec.options",
            )
        session.require(
            accepted or not refusal, f"every choice of option {name} is refused: {refusal}"
        )


@CASES.behaviour(quick=False)
def together(session: Session) -> None:
    """Each option together with the one declared next, neither at its default, computes the same
    attention or is refused by name."""
    last = {
        name: values[-1]
        for name, option in session.backend.options.items()
        if (values := [value for value in _values(option) if value != option.default])
    }
    names = [*last]
    session.needs(
        len(names) >= 2, "fewer than two options say what values they take beside their defaults"
    )
    case = plain(session, "together", q_length=70, kv_length=150)
    for pair in itertools.pairwise(names):
        given = {name: last[name] for name in pair}
        try:
            compare(session, case, attention=with_options({session.name: given}))
        except ArgumentError as error:
            session.require(
                any(name in str(error) for name in pair),
                f"the refusal of {given} names neither: {error}",
            )
