"""Real text that every machine has: the source files of Python's standard library.

A document is a function, a method, or the text between them: half of them have less than 210
bytes, so that many rows hold several. Every document starts with byte 0, which no source file
contains: the bytes alone tell which document a position belongs to.
"""

from __future__ import annotations

import random
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["Corpus", "document_ids", "read_corpus", "sample_rows"]

DOCUMENT_START = 0
"""The byte in front of every document."""

_ENOUGH_BYTES = 6_000_000
_LEAST_BYTES = 100_000

# Empty lines that precede something at the top level, or a method.
_BORDER = re.compile(rb"\n\n+(?=\S|    (?:def|async|class|@))")

# Left out: tables of code points and help topics aren't code; tests are long and repetitive.
_LEFT_OUT = frozenset(
    "__pycache__ dist-packages encodings idlelib lib2to3 pydoc_data site-packages test tests "
    "turtledemo".split()
)


@dataclass(frozen=True)
class Corpus:
    """Documents, each in front of the next.

    Args:
        training, held_out: uint8 [bytes], on the CPU.
        files, documents: how many were read.
        source: the folder they come from.
    """

    training: Tensor
    held_out: Tensor
    files: int
    documents: int
    source: Path


def read_corpus(seed: int, folder: Path | None = None) -> Corpus:
    """Read `folder` (default: the running Python's standard library) and shuffle its documents.

    Raises FileNotFoundError if there are too few source files to train on.
    """
    source = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    pieces: list[bytes] = []
    files = size = 0
    for path in sorted(source.rglob("*.py")):
        if size > _ENOUGH_BYTES or _LEFT_OUT.intersection(path.relative_to(source).parts):
            continue
        content = path.read_bytes()
        files += 1
        size += len(content)
        pieces += [piece.strip(b"\n") + b"\n" for piece in _BORDER.split(content)]
    documents = [bytes([DOCUMENT_START]) + piece for piece in pieces if piece.strip()]
    if size < _LEAST_BYTES:
        raise FileNotFoundError(
            f"the demo trains on the source files of Python's standard library, and {source} "
            f"holds {size} bytes of them (at least {_LEAST_BYTES} are needed)"
        )
    random.Random(seed).shuffle(documents)
    border = max(1, len(documents) // 20)
    return Corpus(
        training=_join(documents[border:]),
        held_out=_join(documents[:border]),
        files=files,
        documents=len(documents),
        source=source,
    )


def _join(documents: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(documents)), dtype=torch.uint8)


def sample_rows(stream: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Cut `rows` random windows out of a stream of packed documents.

    Returns:
        int64 [rows, length + 1] on the CPU: inputs are the first `length` columns, targets the
        last `length`.
    """
    starts = torch.randint(0, stream.numel() - length, (rows, 1), generator=generator)
    return stream[starts + torch.arange(length + 1)].long()


def document_ids(tokens: Tensor) -> Tensor:
    """Number the documents of each row: int64, shaped like `tokens` [rows, length]."""
    return (tokens == DOCUMENT_START).cumsum(1)
