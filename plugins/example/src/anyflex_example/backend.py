"""Entry point: the declarations of the backend, the probe of this machine, and compilation."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Mapping
from typing import ClassVar

import torch

import anyflex
from anyflex.plugin import (
    CONTRACT_1_FIELDS,
    DTYPES,
    Accepted,
    Artifacts,
    Backend,
    Capabilities,
    Decision,
    Kernel,
    Option,
    Rejected,
    Spec,
    make_first_calls,
)
from anyflex_example import mods
from anyflex_example.kernel import ExampleKernel
from anyflex_example.mods import TORCH, load_source, write_source

__all__ = ["ExampleBackend"]

KEYS_AT_ONCE = 128


class ExampleBackend(Backend):
    """Right on every device that torch computes on; fast on none."""

    # A declaration, not a wish: everything declared here must work, and the default `supports`
    # refuses everything else with the reason.
    capabilities = Capabilities(
        dtypes=frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64}),
        head_dim_max=1024,
        different_value_head_dim=True,
        gqa=True,
        kv_broadcast=True,
        scattered=True,
        aux=frozenset({"lse", "max_scores"}),
        gradients=frozenset({"q", "k", "v", "captured", "lse"}),
        captured_dtypes=frozenset(DTYPES.values()),
        deterministic=True,
        operations=TORCH.operations(),
        known_fields=CONTRACT_1_FIELDS | {"sinks"},
        node_dtypes=frozenset(TORCH.types),
    )
    options: ClassVar[Mapping[str, Option]] = {
        "keys_at_once": Option(
            int,
            KEYS_AT_ONCE,
            "keys in one step of the online softmax",
            choices=(16, 32, 64, 128, 256, 512),
        )
    }

    def probe(self) -> Decision:
        """Look for the device without starting it."""
        if self.device_type == "cpu":
            return Accepted()
        found = torch.accelerator.current_accelerator(check_available=True)
        if found is None or found.type != self.device_type:
            return Rejected(
                f"torch sees no {self.device_type} device; install its driver and a torch that "
                "is built for it"
            )
        return Accepted()

    def fingerprint(self) -> str:
        """Part of the disk cache's key, so that artifacts of another version aren't found."""
        # The version stays the same while one works on the table, so its contents are hashed.
        table = zlib.crc32(inspect.getsource(mods).encode())
        return f"torch {torch.__version__}, anyflex {anyflex.__version__}, mods {table:08x}"

    def saved_bytes(self, dtype: torch.dtype) -> tuple[int, int]:
        """`ExampleKernel.saved_outputs`: Ev numbers of 4 bytes a row, for types that round."""
        return (4, 0) if dtype in (torch.bfloat16, torch.float16) else (0, 0)

    def compile(self, spec: Spec, artifacts: Artifacts) -> Kernel:
        """Write the mods as source text, or take the text that an earlier process has written."""
        make_first_calls()
        stored = artifacts.get("mods.py")
        if stored is None:
            stored = write_source(spec).encode()
            artifacts.put("mods.py", stored)
        # A spec holds those options that the user gave.
        keys_at_once = dict(spec.options).get("keys_at_once", KEYS_AT_ONCE)
        return ExampleKernel(spec, load_source(stored.decode()), keys_at_once=int(keys_at_once))
