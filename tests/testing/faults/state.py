"""Faults beside the list: state that a kernel keeps between calls, and state that it changes."""

from __future__ import annotations

from tests.testing.faults.fault import Change, Fault
from tests.testing.faults.precision import RAW

__all__ = ["FAULTS"]

_FORWARD = "    def forward(self, call: Call, out: Outputs) -> None:\n"
_TILES = "        for tile in tiles(call, self.keys_at_once):\n"
_EXTRAS = "        out = saved.extras[0] if saved.extras else saved.out\n"
_DELTA = "            if grad.delta is None:\n"
_CLASS = "class ExampleKernel(Kernel):\n"
_RESULT = "            result = query.new_zeros((*query.shape[:4], call.value.shape[3]))\n"


def _at_forward(*lines: str) -> Change:
    return Change("kernel.py", _FORWARD, _FORWARD + "".join(f"        {line}\n" for line in lines))


def _rounded_if(condition: str) -> Change:
    """Queries with the digits of bfloat16."""
    rounded = "                query = query.bfloat16().to(self.dtype)\n"
    return Change("kernel.py", _RESULT, f"            if {condition}:\n{rounded}{_RESULT}")


FAULTS = (
    Fault(
        201,
        "backward uses what the last forward left in the kernel",
        (
            _at_forward("self.last = out"),
            Change("kernel.py", _EXTRAS, "        out = self.last.out\n"),
        ),
        "state/interleaved",
        "dq is",
    ),
    Fault(
        202,
        "backward destroys what forward has saved",
        (
            Change(
                "kernel.py", _EXTRAS, _EXTRAS.replace("saved.out\n", "saved.out.neg_().neg()\n")
            ),
        ),
        "state/backward_twice",
        "out was written to",
    ),
    Fault(
        203,
        "dout is taken for contiguous",
        (
            Change(
                "kernel.py",
                _EXTRAS,
                _EXTRAS
                + "        size = grad.dout.shape\n        dense = torch.empty(size).stride()\n"
                "        flat = grad.dout.as_strided(size, dense) if "
                "grad.dout.numel() <= grad.dout.untyped_storage().nbytes() // "
                "grad.dout.element_size() else grad.dout.contiguous()\n"
                "        grad = grad._replace(dout=flat)\n",
            ),
        ),
        "state/dout_strides",
        "dq is",
    ),
    Fault(
        204,
        "a delta from outside is ignored",
        (Change("kernel.py", _DELTA, "            if True:\n"),),
        "state/split_keys",
        "dq is",
    ),
    Fault(
        205,
        "random numbers are drawn from the process's generator",
        (_at_forward("torch.rand(())"),),
        "state/global_state",
        "the random number generator's state",
    ),
    Fault(
        206,
        "a live read outside of a captured tensor is clamped in silence",
        (
            Change(
                "mods.py",
                "            if bool((where & live).any()):\n",
                "            if False:\n",
            ),
        ),
        "state/index_error",
        "nobody says so",
    ),
    Fault(
        207,
        "forward asks for what inference mode doesn't have",
        (_at_forward("call.query.view(-1)._version if call.query.is_contiguous() else None"),),
        "state/modes",
        "nference",
    ),
    Fault(
        208,
        "a captured tensor is copied once, by its memory",
        (
            Change("mods.py", "class Pairs:\n", "_COPIES = {}\n\n\nclass Pairs:\n"),
            Change(
                "mods.py",
                "        table = self.call.captured[position]\n        if",
                "        table = self.call.captured[position]\n"
                "        table = _COPIES.setdefault(table.data_ptr(), table.clone())\n        if",
            ),
        ),
        "run_time/in_place",
        "a captured tensor was changed in place",
    ),
    Fault(
        209,
        "compile() hands its text over in a global",
        (
            Change(
                "backend.py",
                "class ExampleBackend(Backend):\n",
                "_STORED = [b'']\n\n\nclass ExampleBackend(Backend):\n",
            ),
            Change(
                "backend.py",
                '            artifacts.put("mods.py", stored)\n',
                '            artifacts.put("mods.py", stored)\n'
                "        _STORED[0] = stored\n        __import__('time').sleep(0.001)\n",
            ),
            Change("backend.py", "stored.decode()", "_STORED[0].decode()"),
        ),
        "processes/compiling_threads",
    ),
    Fault(
        210,
        "more is left for backward than is promised",
        (Change("backend.py", "return (4, 0) if", "return (2, 0) if"),),
        "compiled/forward_once",
        "saved_bytes",
    ),
    Fault(
        211,
        "once a call may round its products, all later ones do",
        (
            Change("kernel.py", _CLASS, "_ASKED = set()\n\n\n" + _CLASS),
            _at_forward("_ASKED.add(torch.get_float32_matmul_precision())"),
            _rounded_if("'medium' in _ASKED"),
        ),
        "state/matmul_precision",
        "out is",
    ),
    Fault(
        212,
        "a kernel that was made where products may be rounded is taken where they may not",
        (
            Change("kernel.py", _CLASS, "_FIRST = []\n\n\n" + _CLASS),
            _at_forward("_FIRST.append(torch.get_float32_matmul_precision())"),
            _rounded_if("_FIRST[0] != 'highest'"),
        ),
        "state/matmul_precision",
        "out is",
    ),
    Fault(
        213,
        "where torch allows float32 products in TF32, they keep 3 bits instead of 10",
        (
            Change(
                "kernel.py",
                RAW,
                "few = torch.float8_e4m3fn if self.spec.fp32_precision == 'high' else self.dtype\n"
                "        few = [t.to(few).to(self.dtype)\n"
                "               for t in (query, self._keys(tile, call.key, keys))]\n"
                "        raw = few[0] @ few[1].mT * call.scale",
            ),
        ),
        "precision/tf32",
        "out is",
    ),
)
