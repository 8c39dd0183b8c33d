"""The same calls under torch.compile and torch.export."""
