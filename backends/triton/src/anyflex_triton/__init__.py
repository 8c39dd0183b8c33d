"""The portable Triton backend of anyflex: kernels for every device that Triton serves."""
