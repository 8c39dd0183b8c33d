"""The acceptance list: 50 score mods and 46 mask mods that every backend is tested with.

`SCORE_MODS["softcap"].make(sizes, generator, dtype)` gives a `Mod`: its leaves (captured tensors,
some of which require a gradient), and the mod as a closure, a partial or a callable object.
"""

from __future__ import annotations

from anyflex.testing.mods.leaves import Sizes
from anyflex.testing.mods.mask_mods import MASK_MODS
from anyflex.testing.mods.mod import Entry, Mod
from anyflex.testing.mods.score_mods import SCORE_MODS

__all__ = ["MASK_MODS", "SCORE_MODS", "Entry", "Mod", "Sizes"]
