"""Seeded faults: the example plugin with one defect each, and the case that reveals it."""
