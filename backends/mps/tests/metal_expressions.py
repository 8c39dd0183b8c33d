"""Expressions of Metal, computed by the emulator for each element of a tensor."""

from __future__ import annotations

import torch
from emulator import compile_shader

__all__ = ["HEAD", "computed"]

HEAD = "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n"


def computed(
    expressions: list[str],
    x: torch.Tensor,
    type_: str = "float",
    result: str = "float",
    out: torch.dtype = torch.float32,
    **how: object,
) -> torch.Tensor:
    """Return each expression of `x` for each element [expressions, elements]."""
    stores = "\n".join(
        f"  out[{n} * (int)P[0] + (int)i] = ({result})({e});" for n, e in enumerate(expressions)
    )
    source = f"""{HEAD}
kernel void computed(device const {type_}* in [[buffer(0)]], device {result}* out [[buffer(1)]],
    constant long* P [[buffer(2)]], uint i [[thread_position_in_grid]])
{{
  const {type_} x = in[i];
{stores}
}}"""
    values = torch.zeros(len(expressions), x.numel(), dtype=out)
    library = compile_shader(source, **how)  # type: ignore[arg-type]
    library.computed(x, values, [x.numel()], threads=x.numel(), group_size=min(x.numel(), 64))
    return values
