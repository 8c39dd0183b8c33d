"""Faults 74 to 78: precision. (19, 54 and 58 are listed with the results that they change.)"""

from __future__ import annotations

from tests.testing.faults.fault import Change, Fault

__all__ = ["FAULTS", "RAW"]

RAW = "raw = query @ self._keys(tile, call.key, keys).mT * call.scale"
SUMMED = "result = result * factor + _product(weights, value, scores != -torch.inf)"
WEIGHTS = "weights = torch.exp(scores - shift)"
AND_BACK = ".to(self.spec.dtype).to(self.dtype)"

FAULTS = (
    Fault(
        74,
        "fp32 inputs multiplied in tf32",
        case="precision/float32_products",
        says="out is ",
        changes=(
            Change(
                "kernel.py",
                RAW,
                "tf32 = [t.contiguous().view(torch.int32).bitwise_and(-8192).view(t.dtype)\n"
                "                for t in (query, self._keys(tile, call.key, keys))]\n"
                "        raw = tf32[0] @ tf32[1].mT * call.scale",
            ),
        ),
    ),
    Fault(
        75,
        "fp16 scores overflow",
        case="precision/float16_scores",
        says="out is nan ",
        changes=(
            Change(
                "kernel.py",
                RAW,
                "raw = (query @ self._keys(tile, call.key, keys).mT)" + AND_BACK + " * call.scale",
            ),
        ),
    ),
    Fault(
        76,
        "out accumulated in bf16 over kv tiles",
        case="precision/long_row",
        says="out is ",
        changes=(
            Change("kernel.py", SUMMED, SUMMED + "\n                result = result" + AND_BACK),
        ),
    ),
    Fault(
        77,
        "P rounded to bf16 before the row sum",
        case="precision/sum_of_weights",
        says="lse is ",
        changes=(Change("kernel.py", WEIGHTS, WEIGHTS + AND_BACK),),
    ),
    Fault(
        78,
        "fp64 silently computed in fp32",
        case="precision/float64",
        says="out is ",
        changes=(
            Change(
                "kernel.py",
                RAW,
                "key32 = self._keys(tile, call.key, keys).float()\n"
                "        raw = (query.float() @ key32.mT).to(self.dtype) * call.scale",
            ),
        ),
    ),
)
