"""All kernels that calls of a spec may launch, for counting buffers and for compiling ahead."""

from __future__ import annotations

from collections.abc import Iterator

from anyflex.plugin import Spec
from anyflex_mps.decode import combine_shader, decode_shader
from anyflex_mps.decode_call import MOST_ROWS
from anyflex_mps.forward import forward_shader
from anyflex_mps.forward_matmul import forward_matmul_shader
from anyflex_mps.keys import keys_shader
from anyflex_mps.options import wants_mpp
from anyflex_mps.queries import queries_shader
from anyflex_mps.rows import rows_shader, totals_shader
from anyflex_mps.text import Shader
from anyflex_mps.tiles import tile_for

__all__ = ["shaders_of"]

_LENGTHS = {"one": range(1, 2), "short": range(2, 65), "long": range(0)}
"""Numbers of query rows of a call that may be decoded, by `Spec.q_class`."""


def shaders_of(spec: Spec) -> list[Shader]:
    """Return the kernels, without duplicates. A call launches some of them."""
    found = [*_forward(spec), *(_backward(spec) if spec.needs_backward else ())]
    return list({shader.text: shader for shader in found}.values())


def _forward(spec: Spec) -> Iterator[Shader]:
    tiles = {
        (tile_for("decode", spec, packed * length), packed)
        for packed in (1, spec.gqa_ratio)
        for length in _LENGTHS[spec.q_class]
        if packed * length <= MOST_ROWS
    }
    for tile, packed in sorted(tiles, key=lambda each: (each[0].rows, each[1])):
        yield decode_shader(spec, tile, packed)
    if tiles:
        yield combine_shader(spec)
    yield forward_matmul_shader(spec) if wants_mpp(spec) else forward_shader(spec)


def _backward(spec: Spec) -> Iterator[Shader]:
    for given in (False, True):
        for dlse in (False, True) if spec.dlse else (False,):
            yield rows_shader(spec, given=given, dlse=dlse)
    if "k" in spec.gradients or "v" in spec.gradients:
        yield keys_shader(spec)
    wants_dq = "q" in spec.gradients
    if not any(facts.needs_grad for facts in spec.captured):
        if wants_dq:
            yield queries_shader(spec, None, wants_dq=True)
    elif spec.determinism == "off":
        yield queries_shader(spec, "floats", wants_dq=wants_dq)
    else:
        yield queries_shader(spec, "bounds", wants_dq=False)
        yield queries_shader(spec, "integers", wants_dq=wants_dq)
        yield totals_shader(spec)
