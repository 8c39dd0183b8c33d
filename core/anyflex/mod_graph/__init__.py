"""Mods as data: tracing, simplifying, differentiating, lowering and evaluating mod graphs."""
