"""Detection of a custom ``autograd.Function`` in a mod, by torch's forward-mode switch.

A graph would hold what a Function's forward does, and be differentiated, instead of its backward
being called. ``Function.apply`` leaves no Python frame since torch 2.14, but every torch switches
forward-mode derivatives off while it runs a Function's forward and ``setup_context``, and while it
makes a view of an input that is returned. ``no_grad`` and ``enable_grad`` don't touch the switch;
``inference_mode`` switches it off too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from anyflex.tensors.torch_versions import forward_mode_enabled, set_forward_mode

__all__ = ["in_custom_function", "outside_of_functions"]


def in_custom_function() -> bool:
    """Tell whether this runs in a Function, or in inference mode: a mod's own one while a mod is
    traced `outside_of_functions`."""
    return not forward_mode_enabled()


@contextmanager
def outside_of_functions() -> Iterator[None]:
    """Hide a Function that is around the attention, as a checkpoint is, from what is called."""
    before = forward_mode_enabled()
    set_forward_mode(True)
    try:
        yield
    finally:
        set_forward_mode(before)
