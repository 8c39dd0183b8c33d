"""Two oracles that share no code with any backend, and the rule by which results are compared."""
