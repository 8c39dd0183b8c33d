"""Faults 79 to 92: caches, run-time values, concurrency."""

from __future__ import annotations

from tests.testing.faults.fault import Change, Fault

__all__ = ["FAULTS"]


def _at_forward(*lines: str) -> Change:
    """Lines at the beginning of the kernel's forward."""
    old = "    def forward(self, call: Call, out: Outputs) -> None:\n"
    return Change("kernel.py", old, old + "".join(f"        {line}\n" for line in lines))


_FORWARD_TILES = (
    "        for tile in tiles(call, self.keys_at_once):\n"
    "            query = tile.of_rows(call.query, kv_heads).to(self.dtype)\n"
    "            result = "
)
_IMPORTS = Change("backend.py", "import torch\n", "import dataclasses\n\nimport torch\n")
_CLASS = "class ExampleBackend(Backend):\n"
_PAIRS = "class Pairs:\n"
_FINGERPRINT = "    def fingerprint(self) -> str:\n"
_SCATTER = "            total.index_put_(places, gradient.to(total.dtype), accumulate=True)"

FAULTS = (
    Fault(
        79,
        "a closed-over number is baked into a cached kernel",
        (_at_forward('vars(call)["floats"] = vars(self).setdefault("floats", call.floats)'),),
        "run_time/numbers",
        "allowed",
    ),
    Fault(
        80,
        "the cache's key lacks the mod's structure",
        (
            _IMPORTS,
            Change("backend.py", _CLASS, "_LOADED = {}\n\n\n" + _CLASS),
            Change(
                "backend.py",
                "load_source(stored.decode())",
                "_LOADED.setdefault(dataclasses.replace(spec, score_graph=None), "
                "load_source(stored.decode()))",
            ),
        ),
        "run_time/two_mods",
        "allowed",
    ),
    Fault(
        81,
        "the cache's key lacks the type of a captured tensor",
        (
            Change("mods.py", _PAIRS, "_DTYPES = {}\n\n\n" + _PAIRS),
            Change(
                "mods.py",
                "        table = self.call.captured[position]\n        if",
                "        table = self.call.captured[position]\n"
                "        table = table.to(_DTYPES.setdefault(position, table.dtype))\n        if",
            ),
        ),
        "run_time/captured_dtype",
        "allowed",
    ),
    Fault(
        82,
        "lengths and batch are baked in",
        (
            Change(
                "kernel.py",
                _FORWARD_TILES,
                _FORWARD_TILES.replace(
                    "tiles(call, self.keys_at_once)",
                    'vars(self).setdefault("tiles", list(tiles(call, self.keys_at_once)))',
                ),
            ),
        ),
        "run_time/lengths",
    ),
    Fault(
        83,
        "closures of equal source share the captured tensors of the first",
        (_at_forward('vars(call)["captured"] = vars(self).setdefault("read", call.captured)'),),
        "run_time/closures",
        "allowed",
    ),
    Fault(
        84,
        "artifacts of another toolchain are taken for its own",
        (Change("backend.py", _FINGERPRINT, _FINGERPRINT + '        return ""\n'),),
        "processes/fresh",
        "fingerprint() is empty",
    ),
    Fault(
        85,
        "threads share static scratch memory",
        (
            Change(
                "kernel.py",
                _FORWARD_TILES,
                _FORWARD_TILES.replace("            query = ", "            self.rows = query = "),
            ),
            Change(
                "kernel.py",
                "self._scores(call, tile, query, keys, partial, check=True)",
                "self._scores(call, tile, self.rows, keys, partial, check=True)",
            ),
        ),
        "processes/threads",
        "thread",
    ),
    Fault(
        86,
        "two calls that overlap share an accumulator of their size (in the form of two threads)",
        (
            Change(
                "kernel.py",
                "class ExampleKernel(Kernel):\n",
                "_KEPT = {}\n\n\nclass ExampleKernel(Kernel):\n",
            ),
            Change(
                "kernel.py",
                "            result = query.new_zeros((*query.shape[:4], call.value.shape[3]))\n",
                "            result = query.new_zeros((*query.shape[:4], call.value.shape[3]))\n"
                "            result = _KEPT.setdefault(result.shape, result).zero_()\n",
            ),
            Change(
                "kernel.py",
                "result = result * factor + _product",
                "result.mul_(factor).add_(_product",
            ),
            Change(
                "kernel.py", "value, scores != -torch.inf)\n", "value, scores != -torch.inf))\n"
            ),
            Change(
                "kernel.py",
                "            result = result / total.masked_fill(total == 0, 1)\n",
                "            result.div_(total.masked_fill(total == 0, 1))\n",
            ),
        ),
        "processes/threads",
        "thread",
    ),
    Fault(
        87,
        "the kernel is launched on the default stream (recorded)",
        (_at_forward("torch.cuda.default_stream()"),),
        "devices/recorded",
        "default stream",
    ),
    Fault(
        88,
        "the kernel is launched on device 0 (recorded)",
        (_at_forward("torch.cuda.set_device(0)"),),
        "devices/recorded",
        "selects a device",
    ),
    Fault(
        89,
        "the device is synchronised in forward (recorded)",
        (_at_forward("torch.accelerator.synchronize()"),),
        "devices/recorded",
        "waits for the device",
    ),
    Fault(
        90,
        "results differ between equal calls",
        (
            Change(
                "kernel.py",
                _FORWARD_TILES,
                _FORWARD_TILES.replace(
                    "self.keys_at_once", '__import__("random").choice((16, 32, 64, 128))'
                ),
            ),
        ),
        "determinism/forward",
        "gives another",
    ),
    Fault(
        91,
        "the deterministic mode is accepted, and sums are taken in whatever order",
        (
            Change("kernel.py", "torch.float64, zeroed=True", "self.dtype, zeroed=True"),
            Change(
                "mods.py",
                _SCATTER,
                "            order = torch.randperm(gradient.numel())\n"
                "            places = tuple(p.reshape(-1)[order] for p in places)\n"
                "            gradient = gradient.reshape(-1)[order]\n" + _SCATTER,
            ),
        ),
        "determinism/mode",
        "another",
    ),
    Fault(
        92,
        "a pool of threads dies in a forked child",
        (
            Change(
                "kernel.py",
                "class ExampleKernel(Kernel):\n",
                "from concurrent.futures import ThreadPoolExecutor\n\n"
                "_POOL = ThreadPoolExecutor(1)\n\n\nclass ExampleKernel(Kernel):\n",
            ),
            _at_forward("_POOL.submit(len, ()).result()"),
        ),
        "processes/fork",
        "hung",
    ),
)
