"""Decisions: a backend's answers to the question whether it takes a spec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Accepted", "Decision", "Rejected"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The backend takes the spec.

    Args:
        backward: ``"own"`` if ``Kernel.backward`` is implemented for this spec, ``"core"`` if core
            shall compute the gradients from out and lse, in chunked torch operations on the same
            device.
    """

    backward: Literal["own", "core"] = "own"

    def __post_init__(self) -> None:
        if self.backward not in ("own", "core"):
            raise ValueError(
                f"Accepted(backward=...) must be 'own' or 'core', got {self.backward!r}"
            )


@dataclass(frozen=True, slots=True)
class Rejected:
    """The backend does not take the spec.

    Args:
        reason: one line for the user: what is not supported, and the cure if there is one.
            Never empty.
    """

    reason: str

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason.strip():
            raise TypeError(
                f"Rejected(reason): a refusal needs a reason, a str that says it, got "
                f"{self.reason!r}"
            )


Decision: TypeAlias = Accepted | Rejected
"""Return type of `Backend.supports`."""
