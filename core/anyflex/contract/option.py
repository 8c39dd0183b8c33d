"""A backend's own tuning option."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Option"]


@dataclass(frozen=True, slots=True)
class Option:
    """One key of ``kernel_options[backend name]``.

    Args:
        type: ``int``, ``float``, ``bool`` or ``str``. A bool is never taken for an int.
        default: the value when the key is absent.
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

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError for a declaration that no value could meet."""
        if self.type not in (int, float, bool, str):
            raise TypeError(f"Option(type=...) must be int, float, bool or str, got {self.type!r}")
        if not isinstance(self.doc, str) or not self.doc.strip():
            raise TypeError(f"Option(doc=...) must say what the option does, got {self.doc!r}")
        if not isinstance(self.choices, tuple):
            raise TypeError(f"Option(choices=...) must be a tuple, got {self.choices!r}")
        if self.torch_key is not None and not isinstance(self.torch_key, str):
            raise TypeError(f"Option(torch_key=...) must be a str, got {self.torch_key!r}")
        for name, values in (("choices", self.choices), ("default", (self.default,))):
            for value in values:
                if not self._has_type(value) and not (name == "default" and value is None):
                    raise TypeError(
                        f"Option({name}=...) must be of type {self.type.__name__}, got {value!r}"
                    )
        if self.choices and self.default is not None and self.default not in self.choices:
            raise ValueError(
                f"Option(default={self.default!r}) is none of its choices {self.choices!r}"
            )

    def _has_type(self, value: object) -> bool:
        if self.type is float and type(value) is int:
            return True
        return type(value) is self.type
