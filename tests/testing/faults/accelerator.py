"""Faults 86, 87 and 89 as they are on an accelerator."""

from __future__ import annotations

from tests.testing.faults import caches
from tests.testing.faults.fault import Change, Fault

__all__ = ["FAULTS"]

_FORWARD = "    def forward(self, call: Call, out: Outputs) -> None:\n"
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
        _SCRATCH,
        "devices/two_streams",
        "overlapping calls give another",
    ),
    Fault(
        87,
        "the kernel is launched on the default stream",
        (_inside("torch.cuda.stream(torch.cuda.default_stream())"),),
        "devices/side_stream",
        "wanted",
    ),
    Fault(
        89,
        "the device is synchronised in forward",
        (Change("kernel.py", _FORWARD, _FORWARD + "        torch.cuda.synchronize()\n"),),
        "devices/no_synchronisation",
        "forward waits",
    ),
)
