"""Measures models of Hugging Face transformers on anyflex beside sdpa and eager attention.

    python bench/transformers_models.py [--rounds 7] [--rows NAME...] [--threads 1] [--device cuda]

Needs the plugin and transformers: `pip install ".[transformers]"`. A model is made once, and
changes its implementation between the rounds, so that all compute the same with the same weights;
their times are taken in turns. On a CPU that is the process's CPU time, else wall time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyflex_transformers
import torch
import transformers

from anyflex.bench.machine import command_of, cpu_name, source_commit

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 128}
LENGTH = 1024


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what is measured.
        run: does it once with a model.
        model, options: transformers' names and the config's options.
        peers: implementations beside anyflex.
        dtype: of the model.
    """

    name: str
    run: Callable[[Any], Any]
    model: str = "Llama"
    options: dict[str, Any] | None = None
    peers: tuple[str, ...] = ("sdpa", "eager")
    dtype: torch.dtype = torch.float32

    def make(self, device: str) -> Any:
        torch.manual_seed(0)
        if self.model == "T5":
            config = transformers.T5Config(
                vocab_size=1024,
                d_model=512,
                d_ff=1024,
                num_layers=2,
                num_heads=8,
                dropout_rate=0.0,
                decoder_start_token_id=0,
            )
            model = transformers.T5ForConditionalGeneration(config)
        else:
            config = getattr(transformers, f"{self.model}Config")(**SIZES, **(self.options or {}))
            model = getattr(transformers, f"{self.model}ForCausalLM")(config)
        return model.to(device=device, dtype=self.dtype).eval()


def tokens(model: Any, batch: int = 1, length: int = LENGTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 1024, (batch, length), generator=generator).to(model.device)


def left_padded(given: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(given)
    mask[0, : given.shape[1] // 2] = 0
    return mask


def forward(model: Any) -> None:
    with torch.no_grad():
        model(tokens(model), use_cache=False)


def train(model: Any) -> None:
    given = tokens(model)
    model(given, labels=given, use_cache=False).loss.backward()
    model.zero_grad()


def train_padded(model: Any) -> None:
    given = tokens(model, batch=2)
    mask = left_padded(given)
    model(given, labels=given, attention_mask=mask, use_cache=False).loss.backward()
    model.zero_grad()


def train_packed(model: Any) -> None:
    given = tokens(model)
    places = torch.arange(LENGTH // 4, device=model.device).repeat(4)[None]
    model(given, labels=given, position_ids=places, use_cache=False).loss.backward()
    model.zero_grad()


def train_t5(model: Any) -> None:
    given = tokens(model, length=512)
    model(given, labels=given, use_cache=False).loss.backward()
    model.zero_grad()


def generate(cache: str, batch: int = 1, *, padded: bool = False) -> Callable[[Any], None]:
    def run(model: Any) -> None:
        given = tokens(model, batch)
        mask = left_padded(given) if padded else torch.ones_like(given)
        model.generate(
            given,
            attention_mask=mask,
            max_new_tokens=64,
            min_new_tokens=64,
            do_sample=False,
            cache_implementation=cache,
        )

    return run


ROWS = (
    Row("causal, forward + backward", train),
    Row("causal, forward", forward),
    Row("batch 2, half of one row left-padded, forward + backward", train_padded),
    Row("packed, 4 documents, forward + backward", train_packed),
    Row("Mistral, window 128, forward + backward", train, "Mistral", WINDOW),
    Row(
        "Gemma 2, soft cap, window 128, forward + backward",
        train,
        "Gemma2",
        {**WINDOW, "head_dim": 64},
        ("eager",),
    ),
    Row("bfloat16, causal, forward + backward", train, dtype=torch.bfloat16),
    Row("T5, 2 + 2 layers, 512 tokens, forward + backward", train_t5, "T5"),
    Row("prompt of 1024 and 64 tokens, dynamic cache", generate("dynamic")),
    Row("prompt of 1024 and 64 tokens, static cache", generate("static")),
    Row("the same, batch 2 left-padded, dynamic", generate("dynamic", 2, padded=True)),
    Row("the same, batch 2 left-padded, static", generate("static", 2, padded=True)),
)


def measured(row: Row, rounds: int, device: str) -> dict[str, float]:
    """Return the median time of each implementation in seconds."""
    model = row.make(device)
    samples: dict[str, list[float]] = {
        name: [] for name in (anyflex_transformers.NAME, *row.peers)
    }
    # The first round compiles and allocates.
    for turn in range(rounds + 1):
        for name, taken in samples.items():
            model.set_attn_implementation(name)
            began = now(device)
            row.run(model)
            if turn:
                taken.append(now(device) - began)
    return {name: statistics.median(taken) for name, taken in samples.items()}


def now(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", nargs="*", default=[], help="words that a row's name has")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    print(
        f"`{command_of('bench/transformers_models.py')}`, {cpu_name()}, {options.device}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}, commit {source_commit()}"
    )
    print("\n| Case | anyflex, ms | sdpa | eager |\n|---|---|---|---|")
    for row in ROWS:
        if options.rows and not any(word in row.name for word in options.rows):
            continue
        times = measured(row, options.rounds, options.device)
        ours = times.pop(anyflex_transformers.NAME)
        ratios = [
            f"{times[peer] / ours:.2f}" if peer in times else "" for peer in ("sdpa", "eager")
        ]
        print(f"| {row.name} | {ours * 1e3:.0f} | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
