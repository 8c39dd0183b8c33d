"""LLVM by way of llvmlite: IR text to object code, and object code to addresses.

llvmlite is imported by the first use of this module's functions and never before. All calls into
LLVM are made under one lock. IR is verified before anything else sees it: LLVM's passes end the
process on invalid IR.
"""

from __future__ import annotations

import functools
import os
import platform
import threading
import weakref
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

__all__ = ["LoadedCode", "Target", "assemble", "host_target", "load_failure"]

_lock = threading.RLock()


class Target:
    """Processor that code is compiled for.

    Args:
        cpu: LLVM's name of the processor.
        features: ``"+avx512f,-amx-tile"`` and so on.
    """

    def __init__(self, cpu: str, features: str) -> None:
        self.cpu = cpu
        self.features = features

    @functools.cached_property
    def enabled(self) -> frozenset[str]:
        """Names of the features that are there."""
        found = self.features.split(",")
        return frozenset(name[1:] for name in found if name.startswith("+"))

    @functools.cached_property
    def version(self) -> str:
        """llvmlite's and LLVM's."""
        return f"llvmlite {version('llvmlite')}, LLVM {_binding().llvm_version_info}"

    @property
    def attributes(self) -> str:
        """Text of a function's attributes: without them LLVM cuts vectors of 512 bits."""
        if "avx512f" not in self.enabled:
            return "nounwind"
        return 'nounwind "prefer-vector-width"="512" "min-legal-vector-width"="512"'

    @functools.cached_property
    def machine(self) -> Any:
        """LLVM's target machine."""
        binding = _binding()
        target = binding.Target.from_triple(binding.get_process_triple())
        return target.create_target_machine(
            cpu=self.cpu, features=self.features, opt=2, **_addressing()
        )


@functools.cache
def _binding() -> Any:
    import llvmlite.binding as binding  # type: ignore[import-untyped]

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


@functools.cache
def load_failure() -> str:
    """Import llvmlite, which loads LLVM, and return what was raised, in one line, or ""."""
    with _lock:
        try:
            _binding()
        # Its library may be missing or lack another one that it needs, or its files be of two
        # versions.
        except (ImportError, OSError, AttributeError, RuntimeError) as error:
            lines = str(error).strip().splitlines()
            return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return ""


@functools.cache
def host_target() -> Target:
    """This machine, with all its features."""
    with _lock:
        binding = _binding()
        return Target(binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten())


def assemble(text: str, target: Target) -> bytes:
    """Return object code.

    Args:
        text: a module in LLVM IR.

    Raises:
        RuntimeError: LLVM refuses the text, which is a mistake in this package.
    """
    with _lock:
        binding = _binding()
        context = binding.create_context()
        module = binding.parse_assembly(text, context)
        module.triple = binding.get_process_triple()
        module.data_layout = str(target.machine.target_data)
        module.verify()
        code: bytes = target.machine.emit_object(module)
        module.close()
        context.close()
        return code


class LoadedCode:
    """Object code in memory, executable. It stays as long as this object does.

    Args:
        code: of `assemble`.
        symbols: addresses of functions that it calls beside the C library's.
    """

    def __init__(self, code: bytes, symbols: Mapping[str, int]) -> None:
        with _lock:
            binding = _binding()
            for name, address in symbols.items():
                binding.add_symbol(name, address)
            empty = binding.parse_assembly("", binding.create_context())
            target = binding.Target.from_triple(binding.get_process_triple())
            machine = target.create_target_machine(jit=True, **_addressing())
            self._engine = binding.create_mcjit_compiler(empty, machine)
            self._engine.add_object_file(binding.ObjectFileRef.from_data(code))
            self._engine.finalize_object()
        # At the end of the process its memory is freed anyway.
        weakref.finalize(self, _close, self._engine).atexit = False

    def address(self, name: str) -> int:
        """Return where a function is.

        Raises:
            RuntimeError: the code has no such function.
        """
        with _lock:
            found = int(self._engine.get_function_address(name))
        if found == 0:
            raise RuntimeError(f"compiled code without its function {name}")
        return found


def _close(engine: Any) -> None:
    with _lock:
        engine.close()


def _addressing() -> dict[str, str]:
    """How code reaches its constants and the functions that it calls. Each lies in memory of its
    own, anywhere that the loader gets some: on x86, addresses have 64 bits, since 32 may not
    reach. (llvmlite's memory manager, which would keep them together, ends the process where it
    has miscounted.) Elsewhere llvmlite keeps them together by default."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return {"reloc": "static", "codemodel": "large"}
    return {"reloc": "pic", "codemodel": "small"}


if hasattr(os, "register_at_fork"):
    # llvmlite has a lock of its own, which a child would inherit held: a fork waits until no
    # thread compiles.
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )
