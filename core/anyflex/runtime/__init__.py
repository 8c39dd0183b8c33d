"""Run-time half of a call: spec, kernel, launch, autograd and the two static ops."""
