"""Compiling kernels' C++ with clang, and the folder that keeps the results by content digest."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from .numerics import Numerics
from .parts import FUNCTIONS, KERNELS, Part

__all__ = [
    "check_types",
    "compiled",
    "line_of",
    "missing_compiler",
    "runtime_library",
    "type_warnings",
]

HERE = Path(__file__).parent
CXX = os.environ.get("ANYFLEX_EMULATOR_CXX", "clang++-19")
CACHE = Path(
    os.environ.get("ANYFLEX_EMULATOR_CACHE")
    or Path(tempfile.gettempdir()) / f"anyflex-metal-emulator-{os.getuid()}"
)
"""Folder of compiled parts and libraries. Any number of processes may use it at once."""

EXACT = Numerics()
BASE = (
    "-std=c++20",
    "-fPIC",
    "-march=x86-64-v3",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-exceptions",
    "-fno-rtti",
    # An endless loop stays one.
    "-fno-finite-loops",
    # Each operation of half and bfloat is rounded.
    "-fexcess-precision=16",
    "-Wno-everything",
)
PLAIN = ("-O2", "-gline-tables-only")
UNDEFINED = "signed-integer-overflow,shift,integer-divide-by-zero,float-cast-overflow"
RACES = (
    # Optimizing more costs more than it saves: the checks of each access take most of the time.
    "-O1",
    "-fno-unroll-loops",
    "-gline-tables-only",
    "-DEMULATED_RACES",
    "-fsanitize=thread",
    f"-fsanitize={UNDEFINED}",
    f"-fsanitize-trap={UNDEFINED}",
    "-mllvm",
    "-tsan-instrument-func-entry-exit=0",
)


def missing_compiler() -> str | None:
    """Return why nothing can be compiled here, or None."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return "the Metal emulator runs on x86-64 Linux only"
    if shutil.which(CXX) is None:
        return f"the Metal emulator needs {CXX}: apt-get install clang-19"
    processor = Path("/proc/cpuinfo").read_text()
    missing = [name for name in ("avx2", "fma", "f16c") if name not in processor]
    if missing:
        return f"the Metal emulator needs a processor with {', '.join(missing)}"
    return None


def _run(command: Sequence[str], folder: Path | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise SyntaxError(done.stderr[:6000])


def _kept(name: str, make: Callable[[Path], None]) -> Path:
    """Return the file of that name in the cache, made once: others find it whole or not at all."""
    path = CACHE / name
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            new = Path(folder) / name
            make(new)
            try:
                new.rename(path)
            except OSError:
                # Another process has made the folder of that name meanwhile.
                if not path.is_dir():
                    raise
    return path


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


@functools.cache
def _sources() -> Path:
    """Return a copy of the shim and the runtime in the cache, in a folder by their digest.

    Precompiled headers refer to it: in a checkout, files change.
    """
    files = sorted([*HERE.glob("shim/**/*"), *HERE.glob("runtime/*")])
    texts = {file.relative_to(HERE): file.read_text() for file in files if file.is_file()}

    def make(to: Path) -> None:
        for name, text in texts.items():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_text(text)

    compiler = Path(shutil.which(CXX) or CXX).resolve()
    version = f"{compiler} {compiler.stat().st_mtime_ns}"
    return _kept(f"sources-{_digest(version, *map(str, texts), *texts.values())}", make)


@functools.cache
def runtime_library() -> Path:
    """Return the runtime's library, which every kernel's library links to."""
    folder = _sources()
    source = str(folder / "runtime" / "runtime.cpp")
    flags = (*BASE, f"-I{folder / 'shim'}", "-O2", "-ffp-contract=off", "-shared")
    # Another thread may run a kernel while the process ends.
    flags += ("-fno-c++-static-destructors",)
    return _kept(
        f"runtime-{_digest(*flags)}.so", lambda to: _run([CXX, *flags, source, "-o", str(to)])
    )


@functools.cache
def _flags(race: bool, mathematics: tuple[str, ...]) -> tuple[str, ...]:
    """Return the flags of a build, its precompiled shim among them."""
    shim = _sources() / "shim"
    flags = (*BASE, *(RACES if race else PLAIN), *mathematics, f"-I{shim}")
    header = str(shim / "emulated" / "metal.h")
    precompiled = _kept(
        f"shim-{_digest(*flags)}.pch",
        lambda to: _run([CXX, *flags, "-x", "c++-header", header, "-o", str(to)]),
    )
    return (*flags, "-include-pch", str(precompiled))


def _folders(include: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"-I{folder}" for folder in include)


def compiled(
    parts: Sequence[Part],
    *,
    race: bool = False,
    numerics: Numerics = EXACT,
    include: Sequence[str] = (),
) -> Path:
    """Return the library of a source's parts. Raises SyntaxError with clang's messages.

    The race build is held to address spaces too, but with headers of others.
    """
    flags = (*_flags(race, numerics.compiler_flags), *_folders(include))
    objects = [str(_object(part, flags, checked=race and not include)) for part in parts]
    linked = [*objects, str(runtime_library())]
    return _kept(
        f"kernels-{_digest(*linked)}.so",
        lambda to: _run(["ld", "-shared", *linked, "-o", str(to)]),
    )


def _object(part: Part, flags: Sequence[str], *, checked: bool) -> Path:
    cpp = part.cpp_checked if checked else part.cpp

    def make(to: Path) -> None:
        (to.parent / part.file).write_text(cpp)
        try:
            _run([CXX, *flags, "-x", "c++", "-c", part.file, "-o", to.name], to.parent)
        except SyntaxError as error:
            raise SyntaxError(part.with_source_lines(str(error))) from None

    return _kept(f"part-{_digest(cpp, *flags)}.o", make)


def check_types(cpp: str) -> None:
    """Raise SyntaxError where the C++ doesn't compile with real address spaces."""
    flags = _flags(False, EXACT.compiler_flags)

    def make(to: Path) -> None:
        (to.parent / KERNELS).write_text(cpp)
        _run([CXX, *flags, "-x", "c++", "-fsyntax-only", KERNELS], to.parent)
        to.touch()

    _kept(f"checked-{_digest(cpp, *flags)}", make)


def type_warnings(cpp: str) -> list[tuple[int, str]]:
    """Return the lines of a source with implicit conversions that lose something, and clang's
    words for them."""
    # A precompiled header would bring its own choice of warnings.
    *flags, _, _ = _flags(False, EXACT.compiler_flags)
    flags += ["-include", "emulated/metal.h"]
    warnings = ("-Wconversion", "-Wno-sign-conversion", "-Wno-implicit-int-float-conversion")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / KERNELS).write_text(cpp)
        command = [CXX, *flags, *warnings, "-x", "c++", "-fsyntax-only", KERNELS]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    found = re.findall(rf"^{KERNELS}:(\d+):\d+: warning: (.*)$", done.stderr, re.MULTILINE)
    return [(int(line), text) for line, text in found]


def line_of(library: Path, address: int) -> tuple[str, int] | None:
    """Return the part's file and the line in it that an address of a library belongs to, if
    known."""
    command = ["addr2line", "-i", "-e", str(library), hex(address)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for place in done.stdout.splitlines():
        path, _, line = place.partition(":")
        file, number = path.rpartition("/")[2], line.split(" ")[0]
        if file in (KERNELS, FUNCTIONS) and number.isdigit():
            return file, int(number)
    return None


@functools.cache
def loaded(path: Path) -> ctypes.CDLL:
    """Return a library of the cache, loaded once."""
    return ctypes.CDLL(str(path))
