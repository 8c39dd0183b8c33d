"""Inductor on a GPU: it fuses the work around attention into Triton kernels, whose comments hold
our operation's arguments, and the compiled model agrees with the eager one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask

import anyflex

__all__: list[str] = []

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no CUDA device on this machine"
)

DEVICE = "cuda"
WIDTH, HEADS = 128, 2
MASKS = ("no mask", "own mask", "torch's mask")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """Pointwise work, attention, pointwise work."""

    def __init__(self, scored: bool) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.slopes = nn.Parameter(torch.tensor([0.02, 0.05]))
        self.scored = scored

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        """x: [B, L, WIDTH]."""
        batch, length, width = x.shape
        heads = self.project(nn.functional.silu(x) + 0.5)
        query, key, value = heads.view(batch, length, 3, HEADS, width // HEADS).unbind(2)
        query, key = torch.tanh(query) * 2, torch.sigmoid(key) - 0.5
        slopes, window = self.slopes, length // 2

        def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
            return s + slopes[h] * ((q - k) % window)

        out = anyflex.flex_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2).relu(),
            score if self.scored else None,
            mask,
        )
        assert isinstance(out, Tensor)
        return nn.functional.gelu(out.transpose(1, 2).reshape(batch, length, width)) + x


class Model(nn.Module):
    """A block without a score mod, and one with."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Block(False), Block(True)])

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        """x: [B, L, WIDTH]."""
        for block in self.blocks:
            x = block(x, mask).cos()
        return x


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def mask_named(name: str, length: int) -> Any:
    if name == "no mask":
        return None
    make: Any = anyflex.create_block_mask if name == "own mask" else create_block_mask
    return make(causal, None, None, length, length, device=DEVICE)


def run(attend: Any, model: nn.Module, name: str, length: int, learns: bool) -> list[Tensor]:
    """The output and, where the model learns, the gradients of x and of every parameter."""
    generator = torch.Generator().manual_seed(length)
    x = torch.randn((2, length, WIDTH), generator=generator).to(DEVICE)
    mask = mask_named(name, length)
    if not learns:
        with torch.no_grad():
            return [attend(x, mask)]
    x.requires_grad_()
    out = attend(x, mask)
    used = [parameter for name, parameter in model.named_parameters() if name != "blocks.0.slopes"]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), [x, *used])]


@pytest.mark.parametrize("learns", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", MASKS)
def test_a_compiled_model_gives_what_the_eager_one_gives(
    name: str, dynamic: bool, learns: bool
) -> None:
    model = Model().to(DEVICE)
    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic)
    for length in (256, 384) if dynamic else (256,):
        found = run(compiled, model, name, length, learns)
        for tensor, wanted in zip(found, run(model, model, name, length, learns), strict=True):
            most = wanted.abs().max().item()
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=2e-4 * most)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", MASKS)
def test_the_compiled_function_gives_what_the_eager_one_gives(name: str, dynamic: bool) -> None:
    compiled = torch.compile(anyflex.flex_attention, dynamic=dynamic)
    for length in (256, 384) if dynamic else (256,):
        query, key, value = (torch.randn((2, 2, length, 64), device=DEVICE) for _ in "qkv")
        mask = mask_named(name, length)
        found = compiled(query, key, value, block_mask=mask)
        wanted = anyflex.flex_attention(query, key, value, block_mask=mask)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
