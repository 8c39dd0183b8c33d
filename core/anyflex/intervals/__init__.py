"""Abstract evaluation of mask graphs on boxes of elements: what holds for every element of a box.

`anyflex.intervals.analysis` is the entry point.
"""
