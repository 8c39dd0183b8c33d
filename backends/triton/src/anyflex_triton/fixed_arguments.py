"""Launching the same kernel again for calls of one shape: most of its arguments stay.

Triton's launcher is a function in C behind two in Python, which put its arguments together anew
and encode each descriptor at each launch: 11 of the 35 us that a call of attention took the host.
Where that function in C is known it is called directly, with a list of arguments of which only
what belongs to the call is written; descriptors, which follow from an address and the shape, are
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from anyflex_triton.arguments import Boxes, enter_device
from anyflex_triton.launch import Program, hooked

__all__ = ["FixedArguments"]

_ADDRESSES = 512
"""Of a descriptor, of which the encoded one is kept: the layers of a model have the same shape."""
_GRID, _STREAM = 0, 3
"""Places in the list of arguments."""


class _List(NamedTuple):
    """Arguments of Triton's function in C.

    Args:
        launch: the function.
        arguments: with anything where those of a call stand.
        tensors: name -> places of its address; places of its descriptors, and what encodes them
            for an address.
        others: places and names of a call's.
    """

    launch: Callable[..., None]
    arguments: list[Any]
    tensors: dict[str, tuple[list[int], list[tuple[int, Callable[[int], object]]]]]
    others: list[tuple[int, str]]


class FixedArguments:
    """Arguments that calls of one shape on one device have in common. Thread-safe.

    Args:
        values: by name, none for calls of all shapes; of a descriptor what `Boxes` takes beside
            the base.
        described: name of a descriptor -> name of its tensor, where that is an argument too; else
            they have one name.
    """

    def __init__(
        self, values: Mapping[str, Any], described: Mapping[str, str] | None = None
    ) -> None:
        self.values = values
        self._described = described or {}
        self._lists: dict[Program, _List | None] = {}

    @classmethod
    def of(cls, values: Mapping[str, Any], without: Collection[str]) -> FixedArguments:
        """Those of all values that are neither tensors nor named in `without`."""
        return cls(
            {
                name: (value.shape, value.strides, value.block_shape)
                if isinstance(value, Boxes)
                else value
                for name, value in values.items()
                if name not in without and not isinstance(value, Tensor)
            }
        )

    def launch(
        self, program: Program, grid: int, device: torch.device, values: Mapping[str, Any]
    ) -> None:
        """Run `grid` programs on the current stream of the current device.

        Args:
            values: of all other arguments that aren't constants, and more; of a descriptor the
                tensor, under the tensor's name.
        """
        found = self._lists.get(program)
        if found is None or hooked():
            program.launch(grid, device, self._together(values))
            if program not in self._lists:
                self._prepare(program, device)
            return
        arguments = found.arguments.copy()
        for name, (places, boxed) in found.tensors.items():
            # A number: for a tensor the function in C asks the driver whose memory it is.
            address = values[name].data_ptr()
            for place in places:
                arguments[place] = address
            for place, encoded in boxed:
                arguments[place] = encoded(address)
        for place, name in found.others:
            arguments[place] = values[name]
        arguments[_GRID] = grid
        arguments[_STREAM] = driver.active.get_current_stream(device.index)
        found.launch(*arguments)

    def _together(self, values: Mapping[str, Any]) -> dict[str, Any]:
        together = {**values, **self.values}
        for name, fixed in self.values.items():
            tensor = values.get(self._described.get(name, name))
            if tensor is not None:
                together[name] = Boxes(tensor, *fixed)
        return together

    def _prepare(self, program: Program, device: torch.device) -> None:
        """Remember how to launch a program that was compiled, or that there is no such way."""
        kernel = program.compiled(device.index)
        if kernel is None:
            # Interpreted, or somebody else's launch stands in for the program's.
            return
        launch = _function_in_c(kernel)
        if launch is None:
            self._lists[program] = None
            return
        run = kernel.run
        arguments: list[Any] = [
            1, 1, 1, 0, kernel.function, run.launch_cooperative_grid, run.launch_pdl, None, None,
            kernel.packed_metadata, None, None, None,
        ]  # fmt: skip
        described = iter(kernel.metadata.tensordesc_meta or ())
        made = _List(launch, arguments, {}, [])
        for name in program.order:
            types = program.types.get(name)
            place = len(arguments)
            if types is None:
                arguments.append(program.constants[name])
            elif isinstance(types, str) and types.startswith("tensordesc"):
                shape, strides, _ = self.values[name]
                _, boxed = made.tensors.setdefault(self._described.get(name, name), ([], []))
                boxed.append((place, _encoder(next(described), shape, strides, device)))
                arguments += [None, *shape, *strides]
            elif name in self.values:
                arguments.append(self.values[name])
            else:
                arguments.append(None)
                if isinstance(types, str) and types.startswith("*"):
                    made.tensors.setdefault(name, ([], []))[0].append(place)
                else:
                    made.others.append((place, name))
        self._lists[program] = made


def _function_in_c(kernel: Any) -> Callable[..., None] | None:
    """What Triton's launcher of a kernel calls in the end, or None where it isn't the one that is
    known here."""
    run = kernel.run
    if (
        not triton.__version__.startswith("3.6.")
        or type(run).__module__ != "triton.backends.nvidia.driver"
        or run.global_scratch_size
        or run.profile_scratch_size
    ):
        return None
    described = kernel.metadata.tensordesc_meta
    if not described:
        # Without descriptors it is bare, and else they would be taken apart.
        return run.launch if run.launch.__name__ == "launch" else None
    if None in described or "launcher" not in run.launch.__code__.co_freevars:
        return None
    place = run.launch.__code__.co_freevars.index("launcher")
    launch: Callable[..., None] = run.launch.__closure__[place].cell_contents
    return launch


def _encoder(
    described: Mapping[str, Any], shape: list[int], strides: list[int], device: torch.device
) -> Callable[[int], object]:
    """What encodes the descriptor of a tensor for its address: as Triton 3.6 does."""
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    fill = driver.active.utils.fill_tma_descriptor
    kind = TMA_DTYPE_DEVICE_TO_HOST[described["elem_type"]]
    swizzle, size, box = (described[name] for name in ("swizzle", "elem_size", "block_size"))

    @lru_cache(_ADDRESSES)
    def encoded(address: int) -> object:
        enter_device(device)
        return fill(address, swizzle, size, kind, box, shape, strides, 0)

    return encoded
