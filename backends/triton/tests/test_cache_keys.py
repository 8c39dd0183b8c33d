"""Kernels have the same keys in Triton's cache whatever was compiled before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("triton", reason="there is no Triton whose keys to ask for")

PROGRAM = """
import importlib, json, pkgutil, sys
from anyflex_triton.cache_keys import ask_for_keys

kernels = {}
for package in "anyflex_triton", "anyflex_cuda":
    try:
        folders = importlib.import_module(package).__path__
    except ImportError:
        continue
    for module in pkgutil.iter_modules(folders, package + "."):
        for name, found in vars(importlib.import_module(module.name)).items():
            if name.endswith("_kernel") and getattr(found, "__module__", None) == module.name:
                kernels[f"{module.name}.{name}"] = found
order = sorted(kernels)
if sys.argv[1] == "backwards":
    order.reverse()
elif sys.argv[1] != "all":
    order = sys.argv[1:]
found = {}
for name in order:
    ask_for_keys([kernels[name]])
    read = {}
    for (constant, _), (value, _) in kernels[name].used_global_vals.items():
        read.setdefault(constant, set()).add(str(value))
    twice = [constant for constant, values in read.items() if len(values) > 1]
    found[name] = kernels[name].cache_key, len(read), twice
print(json.dumps(found))
"""


def printed_by(program: str, *words: str) -> str:
    """What a program prints in a process of its own, which compiles, whatever this one does."""
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    ).stdout


def keys_of(*order: str) -> dict[str, Any]:
    """What a process says that asks in this order, of each kernel: its key, how many constants it
    is of, and which of them are several of one name, whose order in the key is by address."""
    return json.loads(printed_by(PROGRAM, *order))  # type: ignore[no-any-return]


def test_keys_are_the_same_in_any_order() -> None:
    found = keys_of("all")
    assert len(found) >= 9
    assert keys_of("backwards") == found
    one = "anyflex_triton.backward_queries.query_kernel"
    assert keys_of(one) == {one: found[one]}
    assert not any(twice for _, _, twice in found.values())
    assert sum(count for _, count, _ in found.values()) > 20


PROGRAMS = """
import sys
from unittest import mock
import torch
from triton.runtime.jit import DependenciesFinder
from anyflex.plugin import Spec, parse_graph
from anyflex_triton import backward_keys, forward, launch
from anyflex_triton.mods import source_for, write_source
from anyflex_triton.generated_modules import load_module

def mod_of(text):
    spec = Spec("cuda", "sm_90", torch.float16, 64, 64, score_graph=parse_graph(text))
    return load_module(source_for(write_source(spec), within=True, coarse=True))

def program_of(module):
    function = forward.forward_kernel
    names = [name for name in function.arg_names if name != "SCORE_MOD"]
    constants = {"SCORE_MOD": module.score_mod}
    return launch.Program(
        function, dict.fromkeys(names, "i32"), constants, {}, launch.Options(4, 1)
    )

asked, update = [], DependenciesFinder._update_hash

def note(finder, function):
    asked.append(function.hash is not None)
    update(finder, function)

with mock.patch.object(DependenciesFinder, "_update_hash", note):
    if "before" in sys.argv:
        program_of(mod_of("input f32 - score;tanh f32 0 -;=1")).source()
    program = program_of(mod_of("input f32 - score;tanh f32 0 -;sin f32 1 -;=2"))
    print(program.source().hash())
# Nobody's key is of a function that hasn't one yet.
assert all(asked) and len(asked) > 10, asked.count(False)
"""


def test_programs_ask_in_that_order_for_mods_too() -> None:
    """A program's key is the same in a process that has made others before."""
    alone = printed_by(PROGRAMS)
    assert alone != ""
    assert printed_by(PROGRAMS, "before") == alone
