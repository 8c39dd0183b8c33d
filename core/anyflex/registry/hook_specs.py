"""The hooks that a plugin may implement: entry-point group ``anyflex.hooks.v1``.

The entry point names a module, an object, or a class that is created without arguments; its
functions are marked with ``anyflex.plugin.hookimpl``. An implementation may leave out arguments
that it doesn't need, and must return quickly: it runs in the user's call.
"""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from anyflex.contract.spec import Spec

__all__ = ["anyflex_compiled", "anyflex_launched", "anyflex_order_candidates", "hookimpl"]

hookspec = pluggy.HookspecMarker("anyflex")
hookimpl = pluggy.HookimplMarker("anyflex")
"""Decorator for a hook plugin's functions, named as the hooks that they implement."""


@hookspec
def anyflex_order_candidates(spec: Spec, candidates: tuple[str, ...]) -> Sequence[str] | None:
    """Return the candidates in the order in which they shall be asked, or None for no opinion.

    Called at the first call of each kind, where the registry chooses by itself. Names that are
    left out follow in their old order; the reference is no candidate here and stays last. The
    implementation called last wins.
    """


@hookspec
def anyflex_compiled(spec: Spec, backend: str, seconds: float) -> None:
    """Called after a backend has compiled a spec; `seconds` is the wall time of its compile."""


@hookspec
def anyflex_launched(spec: Spec, backend: str, variant: str) -> None:
    """Called after each launch of a kernel, forward and backward, on the calling thread."""
