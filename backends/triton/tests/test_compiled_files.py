"""Triton's files among a spec's artifacts: what is kept, what is put back, and what isn't."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build
from triton.runtime.cache import FileCacheManager, get_cache_manager

from anyflex_triton import nvidia_launch
from anyflex_triton.compiled_files import CompiledFiles, module_of

KEY, OTHER_KEY = "ab" * 32, "cd" * 32


class Kept(dict[str, bytes]):
    """As `anyflex.plugin.Artifacts`."""

    def put(self, name: str, data: bytes) -> None:
        self[name] = data


class Compiler:
    """As ``triton.compile``: a kernel comes out of Triton's cache, or is made.

    Args:
        key: of every kernel.
    """

    def __init__(self, key: str = KEY) -> None:
        self.key = key
        self.made = 0

    def __call__(self, source: Any, target: Any, options: Any) -> Any:
        manager = get_cache_manager(self.key)
        group = manager.get_group("k.json")
        if group is None:
            self.made += 1
            files = {"k.ttir": b"text", "k.cubin": b"code" * self.made, "k.json": b"{}"}
            group = {name: manager.put(content, name) for name, content in files.items()}
            manager.put_group("k.json", group)
        binary = Path(group["k.cubin"]).read_bytes()
        asm = {"ttir": "text", "cubin": binary}
        return SimpleNamespace(hash=self.key, asm=asm, kernel=binary, metadata_group=group)


def triton_s_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(folder))


def compile_with(
    kept: Any, compiler: Compiler, text: str = "a", target: str = "sm_90", stages: int = 2
) -> Any:
    source = SimpleNamespace(hash=lambda: text)
    return CompiledFiles(kept).compile(source, target, {"num_stages": stages}, compiler)


def test_another_machine_finds_binary_and_metadata_and_compiles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, compiler = Kept(), Compiler()
    triton_s_cache(tmp_path / "one", monkeypatch)
    made = compile_with(kept, compiler)
    triton_s_cache(tmp_path / "two", monkeypatch)
    found = compile_with(kept, compiler)
    assert compiler.made == 1
    assert found.kernel == made.kernel
    # No IR: it is large, and read by nobody.
    assert set(found.metadata_group) == {"k.cubin", "k.json"}


@pytest.mark.parametrize("other", [{"text": "b"}, {"target": "sm_80"}, {"stages": 3}])
def test_other_sources_targets_and_options_find_nothing(
    other: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept()
    triton_s_cache(tmp_path / "one", monkeypatch)
    compile_with(kept, Compiler())
    triton_s_cache(tmp_path / "two", monkeypatch)
    compiler = Compiler()
    compile_with(kept, compiler, **other)
    assert compiler.made == 1


def test_a_kernel_under_another_key_of_triton_s_is_compiled_and_kept_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting of Triton's in the environment is part of its key."""
    kept = Kept()
    triton_s_cache(tmp_path / "one", monkeypatch)
    compile_with(kept, Compiler())
    other = Compiler(OTHER_KEY)
    compile_with(kept, other)
    triton_s_cache(tmp_path / "two", monkeypatch)
    compile_with(kept, other)
    assert other.made == 1


def test_what_is_in_triton_s_cache_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept()
    triton_s_cache(tmp_path / "one", monkeypatch)
    compile_with(kept, Compiler())
    written: list[str] = []

    class Counting(FileCacheManager):
        def put(self, data: Any, filename: str, binary: bool = True) -> str:
            written.append(filename)
            return super().put(data, filename, binary)

    monkeypatch.setattr(triton.knobs.cache, "manager_class", Counting)
    compile_with(kept, Compiler())
    assert written == []
    # A custom manager is the one that is given kernels.
    triton_s_cache(tmp_path / "two", monkeypatch)
    compile_with(kept, Compiler())
    assert sorted(written) == ["__grp__k.json", "k.cubin", "k.json"]


@pytest.mark.skipif(
    shutil.which("gcc") is None and shutil.which("clang") is None, reason="no C compiler"
)
def test_a_module_in_c_is_loaded_where_there_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load() -> Any:
        return build.compile_module_from_src(
            source, "anyflex_nvidia_launch", include_dirs=nvidia.include_dirs
        )

    kept = Kept()
    source = Path(nvidia_launch.__file__).with_suffix(".c").read_text()
    triton_s_cache(tmp_path / "one", monkeypatch)
    CompiledFiles(kept).keep_module(load())
    (name,) = kept
    assert name.startswith("module-anyflex_nvidia_launch-cpython-")

    def no_compiler(*_: Any, **__: Any) -> str:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(build, "_build", no_compiler)
    triton_s_cache(tmp_path / "none", monkeypatch)
    with pytest.raises(RuntimeError, match="find C compiler"):
        load()
    triton_s_cache(tmp_path / "two", monkeypatch)
    CompiledFiles(kept).give_modules()
    found = load()
    assert Path(str(found.__file__)).is_relative_to(tmp_path / "two")

    # A launcher's module is told by its function, wrapped or not, and goes with its kernel.
    function = found.open_driver
    assert module_of(function) is found
    assert module_of(lambda: function()) is found
    assert module_of(len) is None

    if triton.__version__.startswith("3.6."):
        # A machine without the program `file` looks for it under another key.
        monkeypatch.setattr(build, "platform_key", lambda: "x86_64,Linux,64bit,")
        triton_s_cache(tmp_path / "three", monkeypatch)
        with pytest.raises(RuntimeError, match="find C compiler"):
            load()
        CompiledFiles(kept).give_modules()
        assert Path(str(load().__file__)).is_relative_to(tmp_path / "three")
