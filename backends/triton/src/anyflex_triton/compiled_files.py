"""Triton's own files of a spec's kernels, kept among the spec's artifacts.

Triton's own cache is part of neither anyflex's archives nor torch's bundles: another machine would
compile every kernel again, and need a C compiler. So each kernel's binary and metadata, and the C
modules that load and launch kernels, are copied here, and put back into Triton's cache. A custom
cache manager is honoured.

A kernel is found by its `kernel_name`. Triton's own key would take 0.1 to 0.4 s more per process,
for a checksum of Triton's files and the syntax trees of all functions that a kernel calls. The
artifacts' key covers both, by Triton's version and the checksum of these packages' sources.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
import os
import sysconfig
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import CompiledKernel
from triton.runtime import build
from triton.runtime.cache import get_cache_manager

from anyflex.plugin import Artifacts
from anyflex_triton.ready_kernels import ReadyKernels

__all__ = ["CompiledFiles", "kernel_name", "kernel_to_ship"]

_ABI = sysconfig.get_config_var("SOABI") or "unknown"
"""Python's ABI, which C modules are built for."""
_MODULES = ("cuda_utils", "anyflex_nvidia_launch")
"""Modules that each process needs: Triton's, which talks to the driver, and nvidia_launch.c."""

_LAUNCH_SOURCE = Path(__file__).with_name("nvidia_launch.c")


class CompiledFiles:
    """Compiled kernels and C modules among a spec's artifacts. Thread-safe.

    Args:
        artifacts: of the spec.
        ready: kernels that came compiled with the package, or None.
    """

    def __init__(self, artifacts: Artifacts, ready: ReadyKernels | None = None) -> None:
        self._artifacts = artifacts
        self._ready = ready

    def find(self, name: str, source: Callable[[], Any]) -> CompiledKernel | None:
        """Return a kernel as ``triton.compile`` finds it in its cache, or None if there is none,
        or the user has changed the compiler.

        Args:
            name: result of `kernel_name`.
            source: makes the source that ``triton.compile`` would take.
        """
        if _compiler_is_changed():
            return None
        kept = self._artifacts.get(name)
        if kept is None and self._ready is not None:
            kept = self._ready.get(name)
        if kept is None:
            return None
        key, group = _put_back(kept)
        return CompiledKernel(source(), group, key)

    def keep(self, name: str, compiled: CompiledKernel) -> None:
        """Store a compiled kernel, unless the user has changed the compiler."""
        if not _compiler_is_changed():
            self._artifacts.put(name, _packed(compiled.hash, _files_of(compiled)))

    def give_modules(self) -> None:
        """Put the modules that each process needs into Triton's cache."""
        for name in _MODULES:
            kept = self._artifacts.get(_module_name(name))
            if kept is None:
                continue
            key, files = _unpacked(kept)
            for each in {key, _key_here(name) or key}:
                manager = get_cache_manager(each)
                for file, content in files.items():
                    if manager.get_file(file) is None:
                        manager.put(content, file)

    def keep_module(self, module: ModuleType | None) -> None:
        """Store one of the modules that each process needs; ignore others."""
        if module is None or module.__name__ not in _MODULES:
            return
        name = _module_name(module.__name__)
        if self._artifacts.get(name) is not None:
            return
        path = Path(str(module.__file__))
        try:
            # Triton's folder names are keys in base 32 without padding.
            folder = path.parent.name
            key = base64.b32decode(folder + "=" * (-len(folder) % 8)).hex()
        except binascii.Error:
            return  # a custom cache manager's
        if get_cache_manager(key).get_file(path.name) == str(path):
            self._artifacts.put(name, _packed(key, {path.name: path.read_bytes()}))


def _key_here(name: str) -> str | None:
    """Return Triton 3.6's cache key for one of `_MODULES` on this machine. The key includes what
    Python's `platform` knows of the executable, which is less where the program ``file`` isn't
    installed, as in most small images."""
    # Imported here because Intel's Triton has no such package.
    from triton.backends import nvidia

    platform_key = getattr(build, "platform_key", None)
    folder = Path(str(nvidia.__file__)).parent
    source = folder / "driver.c" if name == "cuda_utils" else _LAUNCH_SOURCE
    if platform_key is None or not source.is_file():
        return None
    return hashlib.sha256((source.read_text() + platform_key()).encode()).hexdigest()


def _compiler_is_changed() -> bool:
    """Whether the user compiles with other tools or options than Triton's own, or replaces kernels
    by hand. `kernel_name` doesn't cover these; only Triton's own key does."""
    compilation, nvidia = knobs.compilation, knobs.nvidia
    return bool(
        compilation.always_compile
        or compilation.override
        or compilation.dump_ir
        or nvidia.ptxas_options
        or nvidia.libdevice_path
        or nvidia.mock_ptx_version
        # Only the variables are looked at: asking Triton for these paths starts the programs.
        or {"TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"} & os.environ.keys()
    )


def kernel_name(*facts: object) -> str:
    """Return the artifact's name of a kernel.

    Args:
        facts: function, types, constants, options and target of the kernel, each identified by its
            repr. Generated functions are identified by their modules' names, which contain a
            checksum.
    """
    said = repr((facts, sorted(get_cache_invalidating_env_vars().items())))
    return f"kernel-{hashlib.sha256(said.encode()).hexdigest()[:32]}.zip"


def _module_name(name: str) -> str:
    return f"module-{name}-{_ABI}.zip"


def kernel_to_ship(compiled: Any) -> bytes:
    """Return a compiled kernel as `CompiledFiles` keeps it, uncompressed, without the paths of
    this machine."""
    files = _files_of(compiled)
    for name, content in files.items():
        if name.endswith(".json"):
            metadata = {**json.loads(content), "extern_libs": []}
            files[name] = json.dumps(metadata).encode()
    return _packed(compiled.hash, files, zipfile.ZIP_STORED)


def _files_of(compiled: Any) -> dict[str, bytes]:
    """Read the files of a kernel that Triton needs: the binary and its metadata, and no IR."""
    (binary,) = [kind for kind, content in compiled.asm.items() if content is compiled.kernel]
    return {
        name: Path(path).read_bytes()
        for name, path in compiled.metadata_group.items()
        if name.endswith((".json", f".{binary}"))
    }


def _put_back(kept: bytes) -> tuple[str, dict[str, str]]:
    """Put a kernel into Triton's cache where that lacks it; return its key there, and its files'
    paths by name."""
    key, files = _unpacked(kept)
    manager = get_cache_manager(key)
    (metadata,) = [name for name in files if name.endswith(".json")]
    group = manager.get_group(metadata) or {}
    if not files.keys() <= group.keys():
        group = {name: manager.put(content, name) for name, content in files.items()}
        # The group is written last, as in Triton: a concurrent reader finds all files or none.
        manager.put_group(metadata, group)
    return key, group


def _packed(key: str, files: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        archive.comment = key.encode()
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
    return stream.getvalue()


def _unpacked(content: bytes) -> tuple[str, dict[str, bytes]]:
    """Return Triton's key and the files; names are file names without a path."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        files = {Path(name).name: archive.read(name) for name in archive.namelist()}
        return archive.comment.decode(), files
