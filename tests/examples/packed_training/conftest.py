"""A small corpus and a small model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from packed_training.corpus import Corpus, read_corpus
from packed_training.model import ByteTransformer, ModelSize

__all__: list[str] = []

SIZE = ModelSize(layers=2, heads=2, head_dim=8, distances=12)


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Python files: 110 kB, one function a document."""
    folder = tmp_path_factory.mktemp("source")
    for number in range(11):
        functions = [
            f"def function_{number}_{index}(argument):\n    return argument + {index}\n"
            for index in range(190)
        ]
        (folder / f"module_{number}.py").write_text("\n\n".join(functions))
    return folder


@pytest.fixture(scope="session")
def corpus(source: Path) -> Corpus:
    return read_corpus(seed=0, folder=source)


@pytest.fixture
def model() -> ByteTransformer:
    """A model whose every weight matters: after its initialisation the layers are the identity."""
    torch.manual_seed(0)
    made = ByteTransformer(SIZE)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return made
