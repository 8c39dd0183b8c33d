"""The demo's parts, and the demo as a whole."""
