"""Ways to change a value between two calls: every one is seen by the second call."""
