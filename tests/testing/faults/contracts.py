"""Faults 93 to 108: declarations, refusals and promises."""

from __future__ import annotations

from tests.testing.faults.fault import Change, Fault

__all__ = ["FAULTS"]

_PROBE = "    def probe(self) -> Decision:\n"
_OUT = "            tile.of_rows(out.out, kv_heads).copy_(result)\n"
_FORWARD = "    def forward(self, call: Call, out: Outputs) -> None:\n"
_LAST = "                tile.of_rows(out.max_scores, kv_heads).copy_(maximum.squeeze(-1))\n"


def _supports(*lines: str) -> Change:
    """A `supports` of its own, which begins with these lines."""
    text = "    def supports(self, spec):\n"
    text += "".join(f"        {line}\n" for line in lines)
    return Change(
        "backend.py", _PROBE, text + "        return super().supports(spec)\n\n" + _PROBE
    )


def _at_forward(*lines: str) -> Change:
    return Change("kernel.py", _FORWARD, _FORWARD + "".join(f"        {line}\n" for line in lines))


def _after_forward(*lines: str) -> Change:
    return Change("kernel.py", _LAST, _LAST + "".join(f"        {line}\n" for line in lines))


FAULTS = (
    Fault(
        93,
        "head dims up to 1024 are declared, and above 128 they are wrong",
        (
            Change(
                "kernel.py",
                "raw = query @ self._keys(tile, call.key, keys).mT * call.scale",
                "raw = query[..., :128] @ self._keys(tile, call.key, keys)[..., :128].mT "
                "* call.scale",
            ),
        ),
        "declared/head_dims",
        "allowed",
    ),
    Fault(
        94,
        "what is declared is refused",
        (_supports("if spec.kv_broadcast:", '    return Rejected("not today")'),),
        "declared/features",
        "not today",
    ),
    Fault(
        95,
        "gradients of captured tensors are accepted and zero",
        (Change("kernel.py", "accumulator += total", "accumulator += 0 * total"),),
        "run_time/closures",
        "table is 0",
    ),
    Fault(
        96,
        "a refusal has an empty reason",
        (
            _supports(
                "decision = super().supports(spec)",
                "if isinstance(decision, Rejected):",
                '    object.__setattr__(decision, "reason", "")',
                "return decision",
            ),
        ),
        "refusals/undeclared",
        "without a reason",
    ),
    Fault(
        97,
        "supports() raises instead of refusing",
        (
            _supports(
                'if spec.kv_layout == "paged":', "    raise NotImplementedError('paged layout')"
            ),
        ),
        "refusals/reserved",
        "raised NotImplementedError",
    ),
    Fault(
        98,
        "supports() depends on what came before",
        (
            _supports(
                'self.asked = getattr(self, "asked", 0) + 1',
                "if self.asked > 9 and spec.gqa_ratio == 1:",
                '    return Rejected("asked too often")',
            ),
        ),
        "refusals/asked_again",
        "asked",
    ),
    Fault(
        99,
        "an unknown kernel option is accepted and ignored",
        (
            Change(
                "backend.py",
                "class ExampleBackend(Backend):\n",
                "class _Anything(dict):\n"
                "    def __contains__(self, key):\n        return True\n\n"
                '    def __missing__(self, key):\n        return Option(int, 0, "anything")\n\n\n'
                "class ExampleBackend(Backend):\n",
            ),
            Change("backend.py", _PROBE, "    options = _Anything(options)\n\n" + _PROBE),
        ),
        "options/unknown",
        "NO_SUCH_KEY",
    ),
    Fault(
        100,
        "a call is accepted and handed to the reference",
        (
            _at_forward(
                "if call.mask is None and not call.captured and self.score_mod is None:",
                "    import anyflex",
                "    asked = anyflex.AuxRequest(lse=True, max_scores=True)",
                "    found, aux = anyflex.flex_attention(call.query, call.key, call.value, "
                'scale=call.scale, enable_gqa=True, return_aux=asked, backend="reference")',
                "    for unrounded in (out.out, *out.saved):",
                "        unrounded.copy_(found)",
                "    for to, value in ((out.lse, aux.lse), (out.max_scores, aux.max_scores)):",
                "        if to is not None:",
                "            to.copy_(value)",
                "    return",
            ),
        ),
        "refusals/who_ran",
        "'reference'",
    ),
    Fault(
        101,
        "16 bytes behind an output are written",
        (
            _after_forward(
                "end = out.out.storage_offset() + out.out.numel()",
                "out.out.as_strided((4,), (1,), end).zero_()",
            ),
        ),
        "memory/tensors",
        "16 bytes after its end",
    ),
    Fault(
        102,
        "a captured tensor is written to",
        (_after_forward("for table in call.captured:", "    table += 1"),),
        "memory/tensors",
        "captured tensor 0 was written to",
    ),
    Fault(
        103,
        "a part of the output is left unwritten",
        (
            Change(
                "kernel.py",
                _OUT,
                "            tile.of_rows(out.out, kv_heads)[..., :16].copy_(result[..., :16])\n",
            ),
        ),
        "memory/tensors",
        "were not written",
    ),
    Fault(
        104,
        "another tensor is returned instead of filling the given one",
        (_at_forward("out.out.data = torch.empty_like(out.out)"),),
        "memory/tensors",
        "other memory",
    ),
    Fault(
        105,
        "a captured tensor is read outside of it at dead pairs",
        (Change("mods.py", ".clamp(0, size - 1)\n", "\n"),),
        "memory/guard_page",
    ),
    Fault(
        106,
        "inputs are kept alive",
        (_at_forward("self.last = call"),),
        "memory/inputs_released",
        "alive",
    ),
    Fault(
        107,
        "probe() imports a compiler",
        (Change("backend.py", _PROBE, _PROBE + "        import torch.utils.cpp_extension\n"),),
        "processes/probe",
        "torch.utils.cpp_extension",
    ),
    Fault(
        108,
        "the output has other strides than were announced",
        (
            _after_forward(
                "out.out.as_strided_(out.out.shape, torch.empty(out.out.shape).stride())"
            ),
        ),
        "compiled/opcheck",
        "strides",
    ),
)
