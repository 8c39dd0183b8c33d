"""Triton's files among a spec's artifacts: what is kept, what is put back, and what isn't."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import build
from triton.runtime.cache import FileCacheManager, get_cache_manager

from anyflex_triton import compiled_files, nvidia_launch
from anyflex_triton.compiled_files import CompiledFiles, kernel_name

KEY = "ab" * 32


class Kept(dict[str, bytes]):
    """As `anyflex.plugin.Artifacts`."""

    def put(self, name: str, data: bytes) -> None:
        self[name] = data


def compiled(key: str = KEY) -> Any:
    """Return a kernel as ``triton.compile`` leaves it in Triton's cache."""
    manager = get_cache_manager(key)
    files = {"k.ttir": b"text", "k.cubin": b"code of " + key.encode(), "k.json": b"{}"}
    group = {name: manager.put(content, name) for name, content in files.items()}
    manager.put_group("k.json", group)
    binary = Path(group["k.cubin"]).read_bytes()
    asm = {"ttir": "text", "cubin": binary}
    return SimpleNamespace(hash=key, asm=asm, kernel=binary, metadata_group=group)


class Found(NamedTuple):
    """Stands for ``triton.compiler.CompiledKernel``, which wants a kernel of a GPU's."""

    source: Any
    metadata_group: dict[str, str]
    hash: str


@pytest.fixture(autouse=True)
def no_gpu_s_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_files, "CompiledKernel", Found)


def triton_s_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", str(folder))


NAME = kernel_name("a kernel")


def find(kept: Kept) -> Any:
    return CompiledFiles(kept).find(NAME, lambda: "source")


def test_another_machine_finds_binary_and_metadata(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept()
    assert find(kept) is None
    triton_s_cache(tmp_path / "one", monkeypatch)
    made = compiled()
    CompiledFiles(kept).keep(NAME, made)
    triton_s_cache(tmp_path / "two", monkeypatch)
    found = find(kept)
    assert (found.source, found.hash) == ("source", KEY)
    # IR isn't kept: it is large, and nobody reads it.
    assert set(found.metadata_group) == {"k.cubin", "k.json"}
    for name, path in found.metadata_group.items():
        assert Path(path).is_relative_to(tmp_path / "two")
        assert Path(path).read_bytes() == Path(made.metadata_group[name]).read_bytes()


def facts(**other: Any) -> tuple[object, ...]:
    usual = {"function": "f", "types": {"x": "*fp32"}, "constants": {"N": 4}, "stages": 2}
    return tuple({**usual, "target": GPUTarget("cuda", 90, 32), **other}.values())


@pytest.mark.parametrize(
    "other",
    [
        {"function": "g"},
        {"types": {"x": "*bf16"}},
        {"constants": {"N": 4.0}},
        {"stages": 3},
        {"target": GPUTarget("cuda", 80, 32)},
    ],
)
def test_other_functions_types_constants_options_and_targets_have_other_names(
    other: dict[str, Any],
) -> None:
    assert kernel_name(*facts()) == kernel_name(*facts())
    assert kernel_name(*facts()) != kernel_name(*facts(**other))


def test_settings_that_change_what_triton_makes_are_part_of_the_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = kernel_name(*facts())
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    assert kernel_name(*facts()) != before


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TRITON_ALWAYS_COMPILE", "1"),
        ("TRITON_KERNEL_OVERRIDE", "1"),
        ("TRITON_KERNEL_DUMP", "1"),
        ("PTXAS_OPTIONS", "--fmad=false"),
        ("TRITON_PTXAS_PATH", "/another/ptxas"),
        ("TRITON_PTXAS_BLACKWELL_PATH", "/another/ptxas"),
        ("TRITON_LIBDEVICE_PATH", "/another/libdevice.bc"),
        ("TRITON_MOCK_PTX_VERSION", "8.0"),
    ],
)
def test_a_changed_compiler_s_kernels_are_neither_found_nor_kept(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, none = Kept(), Kept()
    triton_s_cache(tmp_path, monkeypatch)
    CompiledFiles(kept).keep(NAME, compiled())
    assert find(kept) is not None
    monkeypatch.setenv(variable, value)
    assert find(kept) is None
    CompiledFiles(none).keep(NAME, compiled())
    assert none == {}


def test_what_is_in_triton_s_cache_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Kept()
    triton_s_cache(tmp_path / "one", monkeypatch)
    CompiledFiles(kept).keep(NAME, compiled())
    written: list[str] = []

    class Counting(FileCacheManager):
        def put(self, data: Any, filename: str, binary: bool = True) -> str:
            written.append(filename)
            return super().put(data, filename, binary)

    monkeypatch.setattr(triton.knobs.cache, "manager_class", Counting)
    assert find(kept) is not None
    assert written == []
    # A custom manager receives the kernels.
    triton_s_cache(tmp_path / "two", monkeypatch)
    assert find(kept) is not None
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

    if triton.__version__.startswith("3.6."):
        # A machine without the program `file` looks for it under another key.
        monkeypatch.setattr(build, "platform_key", lambda: "x86_64,Linux,64bit,")
        triton_s_cache(tmp_path / "three", monkeypatch)
        with pytest.raises(RuntimeError, match="find C compiler"):
            load()
        CompiledFiles(kept).give_modules()
        assert Path(str(load().__file__)).is_relative_to(tmp_path / "three")
