"""Block graphs of mask graphs, against all elements of boxes."""
