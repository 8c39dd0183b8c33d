"""Contract 1: what core and a backend say to each other. Public through `anyflex.plugin`."""

CONTRACT = 1
"""The contract that this version of core speaks."""

CONTRACT_MIN = 1
"""The oldest contract whose backends this version of core still loads."""
