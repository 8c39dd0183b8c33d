"""The abstract evaluation of mask graphs, against all elements of a cell."""
