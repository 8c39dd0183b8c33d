"""The command line: ``anyflex doctor | explain | demo | cache``."""
