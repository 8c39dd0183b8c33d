"""Faults 86, 87 and 89 as they are on an accelerator, on an example that doesn't wait for it."""

from __future__ import annotations

from tests.testing.faults import caches
from tests.testing.faults.fault import Change, Fault

__all__ = ["ASYNCHRONOUS", "FAULTS"]

_FORWARD = "    def forward(self, call: Call, out: Outputs) -> None:\n"
# The example looks for NaN on the host, which waits for the device.
ASYNCHRONOUS = (Change("kernel.py", "    if bool(finite.all()):\n", "    if True:\n"),)
_SCRATCH = next(fault.changes for fault in caches.FAULTS if fault.number == 86)


def _inside(context: str) -> Change:
    """Forward within a context."""
    inner = _FORWARD.replace("forward", "within")
    wrapper = (
        f"        with {context}:\n            self.within(call, out)\n\n    @torch.no_grad()\n"
    )
    return Change("kernel.py", _FORWARD, _FORWARD + wrapper + inner)


FAULTS = (
    Fault(
        86,
        "two streams share an accumulator",
        (*ASYNCHRONOUS, *_SCRATCH),
        "devices/two_streams",
        "overlapping calls give another",
    ),
    Fault(
        87,
        "the kernel is launched on the default stream",
        (*ASYNCHRONOUS, _inside("torch.cuda.stream(torch.cuda.default_stream())")),
        "devices/side_stream",
        "wanted",
    ),
    Fault(
        89,
        "the device is synchronised in forward",
        (
            *ASYNCHRONOUS,
            Change("kernel.py", _FORWARD, _FORWARD + "        torch.cuda.synchronize()\n"),
        ),
        "devices/no_synchronisation",
        "forward waits",
    ),
)
