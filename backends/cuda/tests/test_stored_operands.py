"""Conversion of keys and values stored in 8 bits, its PTX run in Python."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from anyflex_cuda import stored_operands


def permuted(low: int, high: int, selected: int) -> int:
    """Return the result of ``prmt``: four of the eight bytes of two words."""
    both = (low | high << 32).to_bytes(8, "little")
    return int.from_bytes(bytes(both[selected >> 4 * i & 7] for i in range(4)), "little")


def halves(word: int) -> np.ndarray:
    """Return the two numbers of a word, the lower one first."""
    return np.array([word], np.uint32).view(np.float16)


def run(text: str, inputs: Sequence[int]) -> list[np.ndarray]:
    """Return the outputs of PTX of four outputs, each two numbers in float16."""
    values: dict[str, int] = {f"${4 + i}": word for i, word in enumerate(inputs)}

    def value(name: str) -> int:
        return values[name] if name in values else int(name, 16)

    for line in text.strip("{} ").split(";"):
        if not line.strip() or line.strip().startswith(".reg"):
            continue
        operation, operands = line.split(maxsplit=1)
        names = re.findall(r"[$\w]+", operands)
        if operation == "mov.b32" and "{" in operands:
            low, high, word = names
            values[low], values[high] = value(word) & 0xFFFF, value(word) >> 16
        elif operation == "mov.b32":
            values[names[0]] = value(names[1])
        elif operation == "xor.b32":
            values[names[0]] = value(names[1]) ^ value(names[2])
        elif operation == "prmt.b32":
            values[names[0]] = permuted(*map(value, names[1:]))
        elif operation == "sub.f16x2":
            found = halves(value(names[1])) - halves(value(names[2]))
            values[names[0]] = int(found.view(np.uint32)[0])
        else:
            assert operation == "cvt.rn.f16x2.e4m3x2", operation
            stored = torch.tensor([value(names[1])], dtype=torch.uint16)
            wide = stored.view(torch.float8_e4m3fn).half().numpy()
            values[names[0]] = int(wide.view(np.uint32)[0])
    return [halves(values[f"${i}"]) for i in range(4)]


@pytest.mark.parametrize("stored", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("interleaved", [True, False])
def test_every_stored_number_is_converted_exactly(stored: str, interleaved: bool) -> None:
    texts = (stored_operands._OF_INT8 if stored == "int8" else stored_operands._OF_FLOAT8).value
    order = stored_operands._INTERLEAVED if interleaved else stored_operands._APART
    dtype = torch.int8 if stored == "int8" else torch.float8_e4m3fn
    for first in range(0, 256, 8):
        stored_bytes = torch.arange(first, first + 8, dtype=torch.uint8).roll(first // 8)
        # Registers have numbers of one place in both words, or the numbers of a word in order.
        places = stored_bytes.view(2, 4).T if interleaved else stored_bytes.view(4, 2)
        wanted = places.contiguous().view(dtype).double().numpy()
        low, high = (int(word) for word in stored_bytes.numpy().view(np.uint32))
        found = run(texts[0] + order.value + texts[1], (low, high))
        np.testing.assert_array_equal(np.array(found, float), wanted)
