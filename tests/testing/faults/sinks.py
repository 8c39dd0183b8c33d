"""Faults 801 to 805: sinks."""

from __future__ import annotations

from tests.testing.faults.fault import Change, Fault

__all__ = ["FAULTS"]

SINKS = "sinks = call.sinks[:, None, None].expand(*call.query.shape[:3], 1)"
SHARE = "result * (total / (total + weight))"
WEIGHT = "weight = torch.exp(tile.of_rows(sinks, kv_heads) - _finite_shift(maximum))"

FAULTS = (
    Fault(
        801,
        "sinks are left out",
        case="sinks/forward",
        says="out is ",
        changes=(Change("kernel.py", SHARE, "result"),),
    ),
    Fault(
        802,
        "the sinks of other heads",
        case="sinks/learned_grouped",
        says="out is ",
        changes=(Change("kernel.py", SINKS, SINKS.replace("call.sinks", "call.sinks.flip(0)")),),
    ),
    Fault(
        803,
        "a sink isn't relative to the row's maximum",
        case="sinks/forward",
        says="out is ",
        changes=(
            Change("kernel.py", WEIGHT, "weight = torch.exp(tile.of_rows(sinks, kv_heads))"),
        ),
    ),
    Fault(
        804,
        "lse has the sinks in it",
        case="sinks/forward",
        says="lse is ",
        changes=(
            Change(
                "kernel.py",
                "lse = _finite_shift(maximum) + total.log()",
                "lse = _finite_shift(maximum) + (total + weight).log()",
            ),
        ),
    ),
    Fault(
        805,
        "backward takes the sinks out of lse again",
        case="sinks/learned",
        says="d[qkv] is ",
        changes=(
            Change(
                "kernel.py",
                "lse = tile.of_rows(saved.lse, kv_heads).unsqueeze(-1)",
                "lse = saved.lse\n"
                "            if call.sinks is not None:\n"
                "                lse = (lse.exp() - call.sinks[:, None].exp()).log()\n"
                "            lse = tile.of_rows(lse, kv_heads).unsqueeze(-1)",
            ),
        ),
    ),
)
