"""Packed sequences: many sequences of any lengths in one call, one after the other."""
