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


def keys_of(*order: str) -> dict[str, Any]:
    """What a process says that asks in this order, of each kernel: its key, how many constants it
    is of, and which of them are several of one name, whose order in the key is by address."""
    command = [sys.executable, "-c", PROGRAM, *order]
    compiled = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=compiled, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_keys_are_the_same_in_any_order() -> None:
    found = keys_of("all")
    assert len(found) >= 9
    assert keys_of("backwards") == found
    one = "anyflex_triton.backward_queries.query_kernel"
    assert keys_of(one) == {one: found[one]}
    assert not any(twice for _, _, twice in found.values())
    assert sum(count for _, count, _ in found.values()) > 20


def test_programs_ask_in_that_order() -> None:
    """The source of a program has the key of a process that asked for no other before."""
    one = "anyflex_triton.forward.forward_kernel"
    program = """
from types import SimpleNamespace
from anyflex_triton import backward_keys, forward, launch
backward_keys.key_kernel.cache_key
function = forward.forward_kernel
program = launch.Program(
    function, dict.fromkeys(function.arg_names, "i32"), {}, (), launch.Options(4, 1)
)
program.source()
print(function.cache_key)
"""
    compiled = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=compiled, stdout=subprocess.PIPE, check=True, text=True)
    assert done.stdout.strip() == keys_of(one)[one][0]
