"""Packed sequences and pages in the emulator's race build, against the dense formula in float64.

`test_kernel_faults.py` runs the calls of `packed_calls`, too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from emulated_backend import SCHEDULE, drawn_schedule
from packed_calls import CALLS, PackedCall
from small_calls import Poisoned
from soak import SOAK
from torch import Tensor

import anyflex
from anyflex.plugin import BackendRefused, Call, Outputs, isolated, register
from anyflex.testing import posing
from anyflex_mps.kernel import MpsKernel
from anyflex_mps.lowering import LONGEST

CLOSE = {torch.float32: 2e-5, torch.float16: 6e-3, torch.bfloat16: 5e-2}
"""Largest errors relative to the largest element, by dtype."""


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[MpsKernel, Call, Outputs]]]:
    """Kernels that ran, and what with: all are of packed sequences."""
    calls: list[tuple[MpsKernel, Call, Outputs]] = []
    forward = MpsKernel.forward

    def recorded(kernel: MpsKernel, call: Call, out: Outputs) -> None:
        assert call.packed is not None
        calls.append((kernel, call, out))
        forward(kernel, call, out)

    monkeypatch.setattr(MpsKernel, "forward", recorded)
    with isolated(), posing("mps", arch="apple9"):
        register("mps", Poisoned)
        yield calls


def drawn(seed: int) -> PackedCall:
    """Return a call: lengths with tails and of 0, grouped heads, pages of any size, mods."""
    make = random.Random(seed)
    count, most = make.choice([1, 2, 5]), make.choice([1, 3, 20, 150])
    kv_heads, named = make.choice([1, 2]), make.random() < 0.6
    dims = make.choice([(16, 8), (33, 20), (64, 64), (8, 1), (1, 40)])
    if make.random() < 0.1:
        dims = make.choice([(128, 128), (256, 16)])
    keys = tuple(make.choice([0, 1, 9, 33, 70, 200]) for _ in range(count - 1))
    masks = {
        "none": None,
        "causal": lambda b, h, q, k: q >= k,
        "of slots": lambda b, h, q, k: (k <= q + b) & (k % (b + 2) != 1),
        "of heads": lambda b, h, q, k: (k + h) % 3 != 0,
        "some rows": lambda b, h, q, k: (q % 7 != 0) & (k > 2),
    }
    return PackedCall(
        q_lengths=(*(make.randrange(most + 1) for _ in range(count - 1)), most),
        kv_lengths=(*keys, make.choice([40, 530])),
        slots=tuple(make.sample(range(9), count)) if named else tuple(range(count)),
        # Positions before the first key are negative.
        starts=tuple(make.randrange(-3, 60) for _ in range(count)),
        heads=(kv_heads * make.choice([1, 2, 3]), kv_heads),
        dims=dims,
        page=make.choice([0, 0, 1, 16, 24, 128]),
        mask=masks[make.choice(list(masks))],
        scored=make.random() < 0.6,
        sinks=make.random() < 0.3,
        spare=make.choice([0, 0, 3, 140]),
        named=named,
        by_bounds=make.random() < 0.7,
        dtype=make.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16]),
        seed=seed,
    )


@pytest.mark.parametrize("seed", range(300 if SOAK else 5))
def test_a_random_packed_call_is_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SCHEDULE, drawn_schedule(f"packed call {seed}"))
    call = drawn(seed)
    found = call.results()
    for name, wanted in call.expected.items():
        dtype = call.dtype if name == "out" else torch.float32
        size = float(wanted.abs().nan_to_num(0, 0, 0).max().clamp(min=1e-2))
        error = (found[name].double() - wanted).abs().nan_to_num(torch.inf)
        same = (found[name].double() == wanted) | (error <= CLOSE[dtype] * size)
        assert same.all(), f"{name}: {error[~same].max().item()} of {size}"


@pytest.mark.parametrize(
    ("name", "kernel"), [("packed", "prefill 32x32"), ("paged decoding", "decode splits=2")]
)
def test_kernels_take_packed_sequences_as_they_are(
    name: str, kernel: str, ran: list[tuple[MpsKernel, Call, Outputs]]
) -> None:
    CALLS[name].results()
    ((made, call, _),) = ran
    assert made.describe(call) == kernel


LARGE, SMALL = 2**31 - 1, -(2**31)


@pytest.mark.parametrize("name", ["packed", "paged", "packed decoding", "paged decoding"])
def test_numbers_that_break_their_bounds_lead_nowhere(
    name: str, ran: list[tuple[MpsKernel, Call, Outputs]]
) -> None:
    """The emulator reports what is read or written outside of a tensor."""
    # Mods would add broken positions: that overflows before anything is read.
    replace(CALLS[name], scored=False, mask=None).results()
    kernel, call, out = ran[0]
    packed = call.packed
    assert packed is not None

    def broken(tensor: Tensor | None, number: int) -> Tensor | None:
        return None if tensor is None else torch.full_like(tensor, number)

    for number in (LARGE, SMALL, -1):
        for field in ("kv_lengths", "kv_offsets", "page_table", "table_rows", "q_offsets"):
            changed = replace(packed, **{field: broken(getattr(packed, field), number)})
            object.__setattr__(call, "packed", changed)
            kernel.forward(call, out)


def test_page_ids_are_clamped_into_the_pool(
    ran: list[tuple[MpsKernel, Call, Outputs]],
) -> None:
    replace(CALLS["paged decoding"], scored=False).results()
    kernel, call, out = ran[0]
    assert call.packed is not None
    assert call.packed.page_table is not None
    call.key.nan_to_num_(0.5, 0.5)
    call.value.nan_to_num_(0.5, 0.5)
    results = []
    for page in (call.key.shape[0] - 1, LARGE, 0, SMALL):
        call.packed.page_table.fill_(page)
        kernel.forward(call, out)
        results.append(out.out.clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[2], results[3])
    assert not torch.equal(results[0], results[2])


def test_a_bound_of_keys_beyond_the_kernels_integers_is_refused(
    ran: list[tuple[MpsKernel, Call, Outputs]],
) -> None:
    CALLS["paged decoding"].results()
    kernel, call, out = ran[0]
    assert call.packed is not None
    call.packed = replace(call.packed, max_kv=LONGEST + 1)
    with pytest.raises(BackendRefused, match=f"the number of keys is {LONGEST + 1}, and"):
        kernel.forward(call, out)


def test_calls_for_matrix_units_are_dense() -> None:
    backend = Poisoned("mps", "mps")
    spec = anyflex.plugin.Spec(
        "mps", "apple10", torch.float16, 64, 64, options=(("mpp", True),),
        q_layout="packed", kv_layout="packed",
    )  # fmt: skip
    reason = "the kernel of kernel_options['mps']: mpp takes no packed sequences"
    assert str(getattr(backend.supports(spec), "reason", "")) == reason
    assert "kv_storage='int8'" in str(
        backend.supports(replace(spec, options=(), kv_storage="int8"))
    )
