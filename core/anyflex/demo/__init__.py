"""``anyflex demo``: a small transformer trains on this machine, through the public API alone."""
