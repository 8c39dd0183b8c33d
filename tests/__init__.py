"""Tests across packages. Test modules import their data and oracles from here."""
