"""The text: documents, rows, and omissions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from packed_training.corpus import Corpus, document_ids, read_corpus, sample_rows


def _documents(stream: torch.Tensor) -> list[bytes]:
    return bytes(stream.tolist()).split(b"\0")[1:]


def test_every_document_is_a_function(corpus: Corpus) -> None:
    documents = _documents(corpus.training) + _documents(corpus.held_out)
    assert corpus.files == 11
    assert len(documents) == corpus.documents == 11 * 190
    assert all(text.startswith(b"def ") and text.endswith(b"\n") for text in documents)
    assert len(set(documents)) == len(documents)


def test_methods_are_documents_and_paragraphs_in_them_are_not(tmp_path: Path) -> None:
    methods = "".join(
        f"    def method_{n}(self):\n        x = 1\n\n        y = 2\n\n" for n in range(9)
    )
    for number in range(300):
        (tmp_path / f"{number}.py").write_text(f"import os\n\n\nclass Some{number}:\n{methods}")
    corpus = read_corpus(0, tmp_path)
    documents = _documents(corpus.training) + _documents(corpus.held_out)
    assert len(documents) == 300 * 10
    assert b"    def method_3(self):\n        x = 1\n\n        y = 2\n" in documents


def test_held_out_documents_are_not_trained_on(corpus: Corpus) -> None:
    held_out = set(_documents(corpus.held_out))
    assert len(held_out) == 11 * 190 // 20
    assert not held_out & set(_documents(corpus.training))


def test_the_seed_decides_the_order(source: Path, corpus: Corpus) -> None:
    assert torch.equal(read_corpus(0, source).training, corpus.training)
    assert not torch.equal(read_corpus(1, source).training[:200], corpus.training[:200])


def test_tests_and_caches_are_left_out(source: Path, tmp_path: Path) -> None:
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name in ("test", "site-packages", "__pycache__"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "module.py").write_text("left_out = 1\n")
    assert read_corpus(0, tmp_path).files == 11


def test_too_little_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text("x = 1\n")
    with pytest.raises(FileNotFoundError, match=r"holds 6 bytes .*at least 100000 are needed"):
        read_corpus(0, tmp_path)


def test_rows_are_windows_with_their_targets(corpus: Corpus) -> None:
    rows = sample_rows(corpus.training, 5, 64, torch.Generator().manual_seed(0))
    assert rows.shape == (5, 65) and rows.dtype == torch.int64
    whole = bytes(corpus.training.tolist())
    assert all(bytes(row.tolist()) in whole for row in rows)


def test_document_ids_count_the_starts() -> None:
    tokens = torch.tensor([[7, 7, 0, 7, 0, 0, 7], [0, 7, 7, 7, 7, 7, 7]])
    assert document_ids(tokens).tolist() == [[0, 0, 1, 1, 2, 3, 3], [1] * 7]
