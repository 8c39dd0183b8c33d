"""The conformance kit's mods, run on the reference."""
