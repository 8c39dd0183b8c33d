"""Measures models of Hugging Face transformers on anyflex beside transformers' own attention.

    python bench/transformers_models.py [--rounds 7] [--rows NAME...] [--threads 1] [--device cuda]

Needs the plugin and transformers: `pip install ".[transformers]"`. A model is made once, and
changes its implementation between the rounds, so that all compute the same with the same weights;
their times are taken in turns. On a CPU that is the process's CPU time, else wall time. A ratio is
the median of the rounds'. Exits with 1 where a row fails, or is below its target beside sdpa or
flex_attention.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyflex_transformers
import torch
import transformers

from anyflex.bench.machine import command_of, cpu_name, source_commit

PEERS = ("sdpa", "flex_attention", "eager")
COUNTED = ("sdpa", "flex_attention")
"""Peers that a row's target is about."""


@dataclass(frozen=True)
class Scale:
    """Sizes that the rows of one kind of device have in common.

    Attributes:
        sizes: of a model's config.
        length: tokens of a training step and of a prompt.
        window: keys that a token sees in windows.
        batch: sequences of a training step.
        warmups: first runs that aren't timed: they compile and allocate.
    """

    sizes: dict[str, int]
    length: int
    window: int
    batch: int = 1
    warmups: int = 1


SMALL = Scale(
    {
        "vocab_size": 1024,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
    },
    length=1024,
    window=128,
)
LARGE = Scale(
    {
        "vocab_size": 8192,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 16384,
    },
    length=8192,
    window=1024,
    batch=2,
    # torch.compile takes a second length for the first of a dynamic size.
    warmups=2,
)
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: what is measured.
        run: does it once with a model and its scale.
        model, options: transformers' names and the config's options.
        peers: implementations beside anyflex.
        least: times as long as anyflex that each of COUNTED has to take.
        dtype: of the model.
    """

    name: str
    run: Callable[[Any, Scale], Any]
    model: str = "Llama"
    options: dict[str, Any] | None = None
    peers: tuple[str, ...] = ("sdpa", "eager")
    least: float = 1.0
    dtype: torch.dtype = torch.float32

    def make(self, device: str, scale: Scale) -> Any:
        torch.manual_seed(0)
        with torch.device(device):
            model = self._made(scale)
        return model.to(dtype=self.dtype).eval()

    def _made(self, scale: Scale) -> Any:
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
            return transformers.T5ForConditionalGeneration(config)
        named = getattr(transformers, f"{self.model}Config")
        config = named(**scale.sizes, **SPECIAL, **(self.options or {}))
        return getattr(transformers, f"{self.model}ForCausalLM")(config)


def tokens(model: Any, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 1024, (batch, length), generator=generator).to(model.device)


def left_padded(given: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(given)
    mask[0, : given.shape[1] // 2] = 0
    return mask


def forward(model: Any, scale: Scale) -> None:
    with torch.no_grad():
        model(tokens(model, scale.batch, scale.length), use_cache=False)


def train(model: Any, scale: Scale, **options: Any) -> None:
    given = tokens(model, scale.batch, scale.length)
    model(given, labels=given, use_cache=False, **options).loss.backward()
    model.zero_grad()


def train_padded(model: Any, scale: Scale) -> None:
    given = tokens(model, 2, scale.length)
    mask = left_padded(given)
    model(given, labels=given, attention_mask=mask, use_cache=False).loss.backward()
    model.zero_grad()


def train_packed(model: Any, scale: Scale) -> None:
    places = torch.arange(scale.length // 4, device=model.device).repeat(4)
    train(model, scale, position_ids=places.expand(scale.batch, -1))


def train_t5(model: Any, scale: Scale) -> None:
    given = tokens(model, 1, 512)
    model(given, labels=given, use_cache=False).loss.backward()
    model.zero_grad()


def generate(
    cache: str, batch: int = 1, length: int = SMALL.length, *, padded: bool = False
) -> Callable[[Any, Scale], None]:
    def run(model: Any, scale: Scale) -> None:
        given = tokens(model, batch, length)
        mask = left_padded(given) if padded else torch.ones_like(given)
        model.generate(
            given,
            attention_mask=mask,
            max_new_tokens=64,
            min_new_tokens=64,
            do_sample=False,
            cache_implementation=cache,
            # On a GPU transformers would compile the whole model for a static cache.
            disable_compile=True,
        )

    return run


SMALL_ROWS = (
    Row("causal, forward + backward", train),
    Row("causal, forward", forward),
    Row("batch 2, half of one row left-padded, forward + backward", train_padded),
    Row("packed, 4 documents, forward + backward", train_packed, least=1.3),
    Row(
        "Mistral, window 128, forward + backward",
        train,
        "Mistral",
        {"sliding_window": SMALL.window},
        least=1.3,
    ),
    Row(
        "Gemma 2, soft cap, window 128, forward + backward",
        train,
        "Gemma2",
        {"sliding_window": SMALL.window, "head_dim": 64},
        ("eager",),
    ),
    Row("bfloat16, causal, forward + backward", train, dtype=torch.bfloat16),
    Row("T5, 2 + 2 layers, 512 tokens, forward + backward", train_t5, "T5"),
    Row("prompt of 1024 and 64 tokens, dynamic cache", generate("dynamic")),
    Row("prompt of 1024 and 64 tokens, static cache", generate("static")),
    Row("the same, batch 2 left-padded, dynamic", generate("dynamic", 2, padded=True)),
    Row("the same, batch 2 left-padded, static", generate("static", 2, padded=True)),
)
FAST = {"peers": ("sdpa", "flex_attention"), "dtype": torch.bfloat16}
"""Peers without eager attention, whose weights of 8192 x 8192 in each layer fill the memory."""
LARGE_ROWS = (
    Row("batch 2 of 8192, causal, forward + backward", train, **FAST),
    Row("the same, packed, 4 documents each", train_packed, **FAST),
    Row(
        "the same, Mistral, window 1024",
        train,
        "Mistral",
        {"sliding_window": LARGE.window},
        **FAST,
    ),
    Row(
        "the same, Gemma 2, soft cap, window 1024",
        train,
        "Gemma2",
        {"sliding_window": LARGE.window, "head_dim": 128, "query_pre_attn_scalar": 128},
        ("flex_attention",),
        dtype=torch.bfloat16,
    ),
    Row(
        "batch 2, prompt of 2048 and 64 tokens, dynamic cache",
        generate("dynamic", 2, 2048),
        peers=PEERS,
        dtype=torch.bfloat16,
    ),
    Row(
        "that prompt, one half left-padded, dynamic cache",
        generate("dynamic", 2, 2048, padded=True),
        peers=PEERS,
        dtype=torch.bfloat16,
    ),
    # flex_attention reads a wrong length of a static cache.
    Row(
        "that prompt, static cache",
        generate("static", 2, 2048),
        peers=("sdpa", "eager"),
        dtype=torch.bfloat16,
    ),
)


def measured(row: Row, rounds: int, device: str, scale: Scale) -> dict[str, list[float]]:
    """Return each implementation's seconds, one for each round."""
    # Rows share torch's compiled flex_attention, which recompiles eight times at most.
    torch.compiler.reset()
    model = row.make(device, scale)
    samples: dict[str, list[float]] = {
        name: [] for name in (anyflex_transformers.NAME, *row.peers)
    }
    for turn in range(-scale.warmups, rounds):
        for name, taken in samples.items():
            model.set_attn_implementation(name)
            began = now(device)
            row.run(model, scale)
            if turn >= 0:
                taken.append(now(device) - began)
    return samples


def now(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.accelerator.synchronize()
    return time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", nargs="*", default=[], help="words that a row's name has")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    on_cpu = options.device == "cpu"
    name = cpu_name() if on_cpu else torch.cuda.get_device_name(options.device)
    print(
        f"`{command_of('bench/transformers_models.py')}`, {name}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, commit {source_commit()}"
    )
    scale, rows, peers = SMALL, SMALL_ROWS, ("sdpa", "eager")
    if not on_cpu:
        scale, rows, peers = LARGE, LARGE_ROWS, PEERS
    print(f"\n| Case | anyflex, ms | {' | '.join(peers)} |\n|---|---|{'---|' * len(peers)}")
    behind = []
    for row in rows:
        if options.rows and not any(word in row.name for word in options.rows):
            continue
        try:
            times = measured(row, options.rounds, options.device, scale)
        except (RuntimeError, ValueError) as error:
            # The other rows are worth their time on a machine that is lent.
            behind.append(f"{row.name}: {type(error).__name__}: {error}")
            print(f"| {row.name} | failed | {' | ' * len(peers)}", flush=True)
            continue
        ours = times.pop(anyflex_transformers.NAME)
        ratios = {
            peer: statistics.median(theirs / own for theirs, own in zip(taken, ours, strict=True))
            for peer, taken in times.items()
        }
        cells = [f"{ratios[peer]:.2f}" if peer in ratios else "" for peer in peers]
        spent = statistics.median(ours) * 1e3
        print(f"| {row.name} | {spent:.0f} | {' | '.join(cells)} |", flush=True)
        for peer in COUNTED:
            if peer in ratios and ratios[peer] < row.least:
                behind.append(f"{row.name}: {ratios[peer]:.2f} of {peer}, needs {row.least}")
    print("\n" + ("Below target:\n" + "\n".join(behind) if behind else "All reach their targets."))
    return int(bool(behind))


if __name__ == "__main__":
    sys.exit(main())
