"""A small transformer that trains on packed documents, through the public API alone."""
