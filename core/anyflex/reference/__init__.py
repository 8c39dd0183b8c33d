"""The reference: plain torch on any device, forward and backward. It defines correctness."""
