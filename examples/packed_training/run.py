"""The whole demo: read, train, check, sample, draw."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

import anyflex
from packed_training.corpus import Corpus, read_corpus, sample_rows
from packed_training.gradient_check import GradientCheck, check_gradients
from packed_training.model import ByteTransformer, ModelSize, packed_mask
from packed_training.plots import plot_loss
from packed_training.sampling import sample_text
from packed_training.training import Budget, TrainingRun, held_out_loss, train

__all__ = ["DemoResult", "DemoSettings", "run_demo"]

_HELD_OUT_ROWS = 24
_CHECK_ROWS = 2
_PLOT_BYTES = 4096
_PROMPT = b"def "


@dataclass(frozen=True)
class DemoSettings:
    """Settings of the demo.

    Args:
        seconds: wall clock for training; reading, checking and sampling come on top.
        steps: maximum number of steps, if the seconds last; None for no such limit.
        backend: name of the backend to force, or None.
        dtype: float32, or bfloat16 through autocast.
        sample: bytes of text to write.
        plots: folder for the PNG files, or None.
    """

    seconds: float = 50.0
    steps: int | None = None
    seed: int = 0
    device: str = "cpu"
    backend: str | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    size: ModelSize = field(default_factory=ModelSize)
    rows: int = 4
    length: int = 256
    sample: int = 300
    plots: Path | None = None


@dataclass(frozen=True)
class DemoResult:
    """Results of the demo.

    Args:
        loss_before, loss_after: on held-out documents, nats a byte.
        selection: `anyflex.explain` of a layer's attention call, as a dictionary.
        pictures: the PNG files written.
    """

    settings: DemoSettings
    corpus: Corpus
    parameters: int
    run: TrainingRun
    loss_before: float
    loss_after: float
    gradients: GradientCheck
    selection: dict[str, Any]
    text: str
    pictures: tuple[Path, ...]

    @property
    def loss_fell(self) -> bool:
        """Whether the held-out loss is lower than before."""
        return self.loss_after < self.loss_before

    @property
    def passed(self) -> bool:
        """Whether everything that the demo asserts is true."""
        return self.loss_fell and self.gradients.passed

    def to_dict(self) -> dict[str, Any]:
        """Facts for JSON."""
        settings = self.settings
        return {
            "passed": self.passed,
            "device": settings.device,
            "dtype": settings.dtype,
            "seed": settings.seed,
            "backend": self.selection.get("backend"),
            "variant": self.selection.get("variant"),
            "files": self.corpus.files,
            "documents": self.corpus.documents,
            "parameters": self.parameters,
            "steps": len(self.run.losses),
            "seconds": self.run.seconds,
            "tokens": self.run.tokens,
            "tokens_per_second": self.run.tokens / self.run.seconds,
            "loss_before": self.loss_before,
            "loss_after": self.loss_after,
            "losses": self.run.losses,
            "gradient_check": asdict(self.gradients),
            "text": self.text,
            "pictures": [str(path) for path in self.pictures],
        }


def run_demo(settings: DemoSettings, report: Callable[[str], None]) -> DemoResult:
    """Run everything; `report` gets lines of progress.

    Raises FileNotFoundError without standard library sources, and whatever anyflex raises, for
    example BackendRefused for a forced backend.
    """
    torch.manual_seed(settings.seed)
    corpus = read_corpus(settings.seed)
    device = torch.device(settings.device)
    model = ByteTransformer(settings.size).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    report(f"text: {corpus.files} files, {corpus.documents} documents from {corpus.source}")
    report(
        f"model: {settings.size.layers} layers, {settings.size.heads} heads, "
        f"{parameters:,} parameters, on {settings.device}"
    )

    attention = functools.partial(anyflex.flex_attention, backend=settings.backend)
    autocast = _autocast(settings)
    generator = torch.Generator().manual_seed(settings.seed + 1)
    held_out = sample_rows(corpus.held_out, _HELD_OUT_ROWS, settings.length, generator).to(device)
    with autocast():
        selection = _explain(model, held_out[: settings.rows], settings.backend)
        loss_before = held_out_loss(model, held_out, attention)
    report(f"attention: backend {selection.get('backend')}, variant {selection.get('variant')}")
    report(f"held-out loss before: {loss_before:.3f} nats a byte")

    budget = Budget(settings.seconds, settings.steps, settings.rows, settings.length)
    run = train(model, corpus, budget, attention, autocast, settings.seed, report)

    with autocast():
        loss_after = held_out_loss(model, held_out, attention)
        text = sample_text(
            model,
            attention,
            prompt=_PROMPT,
            count=settings.sample,
            context=settings.length,
            seed=settings.seed,
        )
    gradients = check_gradients(model, held_out[:_CHECK_ROWS], attention, autocast)
    pictures: tuple[Path, ...] = ()
    if settings.plots is not None:
        pictures = _draw(settings.plots, corpus, run, (loss_before, loss_after), settings.seed)
    return DemoResult(
        settings=settings,
        corpus=corpus,
        parameters=parameters,
        run=run,
        loss_before=loss_before,
        loss_after=loss_after,
        gradients=gradients,
        selection=selection,
        text=text,
        pictures=pictures,
    )


def _autocast(settings: DemoSettings) -> Callable[[], AbstractContextManager[object]]:
    if settings.dtype == "float32":
        return nullcontext
    device_type = torch.device(settings.device).type
    return functools.partial(torch.autocast, device_type, dtype=torch.bfloat16)


def _explain(model: ByteTransformer, rows: Tensor, backend: str | None) -> dict[str, Any]:
    """Ask `anyflex.explain` about the call of the last layer, as training makes it."""
    explanation: dict[str, Any] = {}

    def explain_and_attend(query: Tensor, key: Tensor, value: Tensor, **mods: Any) -> Any:
        explained = anyflex.explain(query, key, value, **mods, backend=backend)
        explanation.update(explained.to_dict())
        return anyflex.flex_attention(query, key, value, **mods, backend=backend)

    model.loss(rows, explain_and_attend)
    return explanation


def _draw(
    folder: Path, corpus: Corpus, run: TrainingRun, held_out: tuple[float, float], seed: int
) -> tuple[Path, ...]:
    folder.mkdir(parents=True, exist_ok=True)
    mask_file, loss_file = folder / "block_mask.png", folder / "loss.png"
    # A training row has few blocks: a longer one shows the structure.
    generator = torch.Generator().manual_seed(seed)
    row = sample_rows(corpus.training, 1, min(_PLOT_BYTES, len(corpus.training) - 1), generator)
    packed_mask(row[:, :-1]).plot(mask_file)
    plot_loss(run.losses, held_out, loss_file)
    return mask_file, loss_file
