"""The acceptance list of wrong uses as data, and the one test that runs it."""
