"""Contract 1 between core and a backend. Public through `anyflex.plugin`."""

CONTRACT = 1
"""The contract that this version of core speaks."""

CONTRACT_MIN = 1
"""The oldest contract whose backends this version of core still loads."""
