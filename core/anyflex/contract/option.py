"""A backend's own tuning option."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Option"]


@dataclass(frozen=True, slots=True)
class Option:
    """One key of ``kernel_options[backend name]``.

    Args:
        type: ``int``, ``float``, ``bool`` or ``str``. A bool is never taken for an int.
        default: what holds when the key is absent.
        doc: one line, printed by ``anyflex doctor``.
        choices: the allowed values, or empty for any value of the type.
        torch_key: torch's name of the same option (``"BLOCK_M"``), if there is one: the value is
            then also taken from the top level of ``kernel_options``, as torch's users write it.
    """

    type: type
    default: int | float | bool | str | None
    doc: str
    choices: tuple[int | float | bool | str, ...] = ()
    torch_key: str | None = None
