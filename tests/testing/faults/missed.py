"""Faults 601 to 607: of a backend that was written from the documentation alone, and which an
earlier kit, or its quick subset, let pass."""

from __future__ import annotations

from tests.testing.faults.fault import Change, Fault

__all__ = ["FAULTS"]

_FORWARD = "    def forward(self, call: Call, out: Outputs) -> None:\n"
_TILES = "        for tile in tiles(call, self.keys_at_once):\n"
_ROWS = "            query = tile.of_rows(call.query, kv_heads).to(self.dtype)\n            result"
_OUT = "            tile.of_rows(out.out, kv_heads).copy_(result)\n"
_SCORES = "raw = query @ self._keys(tile, call.key, keys).mT * call.scale"
_COMPILE = "    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:\n"
_NUMBER = "        if abs(value) > torch.finfo(dtype).max:\n"

FAULTS = (
    Fault(
        601,
        "what a call is computed from is kept on the kernel, which threads share",
        (
            Change("kernel.py", _FORWARD, f"{_FORWARD}        self.now = call, out\n"),
            Change("kernel.py", _ROWS, f"            call, out = self.now\n{_ROWS}"),
        ),
        "processes/threads_of_long_calls",
        "thread ",
    ),
    Fault(
        602,
        "the gradient of a learned tensor without dimensions is lost beside another tensor",
        (
            Change(
                "mods.py",
                "            total += gradient.sum(dtype=total.dtype)\n",
                "            if len(self.call.captured) == 1:\n"
                "                total += gradient.sum(dtype=total.dtype)\n",
            ),
        ),
        "gradients/scalar_and_table",
        "a is 0",
    ),
    Fault(
        603,
        "a mask function's read outside raises where the function says False",
        (
            Change(
                "kernel.py",
                'raise_for_reads_outside("mask_mod", live)',
                'raise_for_reads_outside("mask_mod", torch.ones_like(live))',
            ),
        ),
        "state/index_error_of_a_mask",
        "outside of it",
    ),
    Fault(
        604,
        "constants of float64 mods are cut to 7 digits",
        (Change("mods.py", _NUMBER, f'        value = float(f"{{value:.7g}}")\n{_NUMBER}'),),
        "precision/float64_constants",
        "allowed",
    ),
    Fault(
        605,
        "the last of 64 rows is not written where 4 query heads share a key head",
        (
            Change(
                "kernel.py",
                _OUT,
                "            if call.query.shape[2] == 64 and self.spec.gqa_ratio == 4:\n"
                "                result = result[..., :-1, :]\n"
                "                tile.of_rows(out.out, kv_heads)[..., :-1, :].copy_(result)\n"
                "            else:\n"
                f"    {_OUT}",
            ),
        ),
        "shapes/gqa_4_1_length_64",
        "not written",
    ),
    Fault(
        606,
        "one query row has the default scale",
        (
            Change(
                "kernel.py",
                _SCORES,
                f"{_SCORES}\n        if call.query.shape[2] == 1:\n"
                "            raw = raw * (call.query.shape[3] ** -0.5 / call.scale)",
            ),
        ),
        "decoding/scale",
        "out is ",
    ),
    Fault(
        607,
        "a lock of compile() is held for ever in a child that is forked meanwhile",
        (
            Change(
                "backend.py",
                _COMPILE,
                "    lock = threading.Lock()\n\n"
                f"{_COMPILE}        with self.lock:\n"
                "            return self.compile_alone(spec, artifacts)\n\n"
                f"{_COMPILE.replace('compile', 'compile_alone')}",
            ),
            Change("backend.py", "import inspect\n", "import inspect\nimport threading\n"),
        ),
        "processes/fork_while_compiling",
        "the forked child hung",
    ),
)
