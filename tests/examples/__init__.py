"""The folder ``examples``."""
