"""500 random calls, drawn from a committed seed, compared with both oracles in float64."""
