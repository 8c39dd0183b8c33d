"""The loop: its two limits, its repeatability, and that the loss falls."""

from __future__ import annotations

from contextlib import nullcontext

import torch

import anyflex
from packed_training.corpus import Corpus, sample_rows
from packed_training.model import ByteTransformer
from packed_training.training import Budget, TrainingRun, held_out_loss, train
from tests.examples.packed_training.conftest import SIZE


def _train(corpus: Corpus, budget: Budget, seed: int = 0) -> tuple[ByteTransformer, TrainingRun]:
    torch.manual_seed(seed)
    model = ByteTransformer(SIZE)
    lines: list[str] = []
    run = train(model, corpus, budget, anyflex.flex_attention, nullcontext, seed, lines.append)
    return model, run


def test_the_loss_on_held_out_documents_falls(corpus: Corpus) -> None:
    rows = sample_rows(corpus.held_out, 8, 48, torch.Generator().manual_seed(1))
    model, run = _train(corpus, Budget(seconds=300, steps=40, rows=4, length=48))
    after = held_out_loss(model, rows, anyflex.flex_attention, at_once=3)
    assert len(run.losses) == 40 and run.tokens == 40 * 4 * 48
    assert run.losses[0] > 5.5
    assert after < 4.0


def test_held_out_loss_does_not_depend_on_how_rows_are_split(
    model: ByteTransformer, corpus: Corpus
) -> None:
    rows = sample_rows(corpus.held_out, 7, 32, torch.Generator().manual_seed(1))
    losses = [held_out_loss(model, rows, anyflex.flex_attention, n) for n in (1, 3, 7)]
    assert max(losses) - min(losses) < 1e-5


def test_steps_with_seconds_to_spare_repeat_with_the_seed(corpus: Corpus) -> None:
    budget = Budget(seconds=300, steps=3, rows=2, length=32)
    runs = [_train(corpus, budget, seed)[1].losses for seed in (0, 0, 1)]
    assert runs[0] == runs[1] != runs[2]


def test_the_clock_ends_it_too_and_one_step_is_made_always(corpus: Corpus) -> None:
    _, run = _train(corpus, Budget(seconds=1e-6, steps=50, rows=1, length=16))
    assert len(run.losses) == 1
    _, run = _train(corpus, Budget(seconds=0.2, steps=None, rows=1, length=16))
    assert len(run.losses) >= 1
