"""The conformance kit's packed sequences on Hopper's kernels, which run in Python. Run as a script
by `test_packed_kit`, with TRITON_INTERPRET=1.

Prints a line for each case: its name and how it ended. Values are float16, whose cases the kit
fits to that; gradients are core's.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch
from backward_in_python import InPython
from decode_in_python import CALLED
from gluon_in_python import Pointer, in_numpy, mod_in_python, run_kernel
from interpreting import hasten
from scripts_beside import SOAK
from test_hopper_calls import CALLED as CALLED_BY_FORWARD
from test_hopper_calls import MODS

from anyflex.testing import posing
from anyflex_cuda import (
    forward_call,
    hopper_decode,
    hopper_forward,
    packed_tile_list,
    packed_tiles,
)
from anyflex_cuda.gluon_launch import GluonProgram
from anyflex_triton import sequences
from anyflex_triton.building import Program

# No public name leads to these: a backend's tests run the kit by `Conformance`, one case a test.
every_case = importlib.import_module("anyflex.testing.cases").every_case
run_case = importlib.import_module("anyflex.testing.runner").run_case
select = importlib.import_module("anyflex.testing.selection").select
open_session = importlib.import_module("anyflex.testing.session").open_session

FEW = "page_edges prefill_and_decoding value_in_key own_nan_in_pages sinks_in_pages a_page_twice"
NOT_SIMULATED = "*softcap*", "*dilated_head*", "*batch_head_mix*", "*int8*", "*float8*"
"""Cases whose mods have operations that `mod_in_python` doesn't, or that core computes as dense
calls with them."""


class InHalf(InPython):
    capabilities = dataclasses.replace(
        InPython.capabilities, dtypes=frozenset({torch.float16}), gradients=frozenset()
    )


def in_python(program: Program, grid: int, values: Mapping[str, Any]) -> None:
    given: dict[str, Any] = {**program.constants}
    given |= in_numpy({name: values[name] for name in program.types})
    given |= {name: mod_in_python(given[name]) for name in MODS if given.get(name) is not None}
    if program.function.__name__ == "forward_kernel":
        called = (*CALLED_BY_FORWARD, sequences, packed_tile_list, packed_tiles)
        run_kernel(hopper_forward, "forward_kernel", grid, given, seed=0, more=called)
    else:
        memory = given["counts"].array
        given["counts"] = Pointer(memory[: memory.size // 2 * 2].view(np.int64))
        run_kernel(hopper_decode, "decode_kernel", grid, given, seed=0, more=CALLED)


def main() -> int:
    hasten()
    launch = Program.launch
    names = [f"ragged/{name}" for name in FEW.split()]
    if SOAK:
        left_out = {case.name for case in select(every_case(), globs=NOT_SIMULATED)}
        every = (case.name for case in select(every_case(), globs=["ragged/*"]))
        names = [name for name in every if name not in left_out]

    def launched(
        program: Program, grid: int, device: torch.device, values: Mapping[str, Any]
    ) -> None:
        if isinstance(program, GluonProgram):
            in_python(program, grid, values)
        else:
            launch(program, grid, device, values)

    with (
        posing("cuda"),
        mock.patch.object(Program, "launch", launched),
        mock.patch.object(forward_call, "cores", lambda device: 3),
        open_session("cuda.python", "cpu", backend_class=InHalf) as session,
    ):
        for case in select(every_case(), globs=names):
            outcome = run_case(session, case)
            print(f"{case.name}: {outcome.status} {outcome.detail}".rstrip(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
