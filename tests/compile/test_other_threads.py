"""While one thread compiles, calls of other threads are as eager as ever: torch's own flag of a
compilation is the process's."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyflex
from anyflex.errors import ModTraceError
from anyflex.tensors.torch_versions import release

__all__: list[str] = []

QUERY = torch.linspace(-1.0, 1.0, 128).view(1, 1, 16, 8)
TABLE = torch.linspace(0.1, 0.9, 16)


def while_compiling(work: Callable[[], Any]) -> Any:
    """Return or raise the result of `work` in a thread of its own, in the midst of a
    compilation."""
    found: list[Any] = []

    def run() -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(work())
        except Exception as error:  # noqa: BLE001 - handed to the test
            found.append(error)

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        # Older torch versions don't set the process's flag while a backend runs.
        assert torch.compiler.is_compiling() or release(torch.__version__) < (2, 13)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(3))
    torch._dynamo.reset()
    (result,) = found
    return result


def attend(mod: Callable[..., Any]) -> Tensor:
    out = anyflex.flex_attention(QUERY, QUERY, QUERY, mod)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.filterwarnings("ignore::anyflex.PerformanceWarning")
@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s + TABLE[k] * (q - k),
        lambda s, b, h, q, k: s + torch.special.i0(TABLE[k]),  # through vmap
    ],
    ids=["traced", "untraceable"],
)
def test_a_call_gives_what_it_gives(mod: Callable[..., Any]) -> None:
    found = while_compiling(lambda: attend(mod))
    torch.testing.assert_close(found, attend(mod), rtol=0, atol=0)


def test_a_refusal_tells_the_line() -> None:
    error = while_compiling(lambda: attend(lambda s, b, h, q, k: s + (1 if q > k else 0)))
    assert type(error) is ModTraceError and "test_other_threads.py" in str(error)


def test_a_mask_is_built() -> None:
    def build() -> anyflex.BlockMask:
        return anyflex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 40, 40)

    assert while_compiling(build) == build()
