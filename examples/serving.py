"""A server that batches requests continuously: HTTP in front, a cache of pages behind.

`python examples/serving.py` trains a small model to count, serves a few conversations with it
through its own HTTP door, and checks what they got. With `--serve PORT` it keeps serving:

    curl -N localhost:8000/generate -d '{"prompt": "\\nup 41:", "tokens": 60}'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import time
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from torch import Tensor, nn
from torch.nn import functional as F

import anyflex
from anyflex import masks

# --- The model: it counts, "up 41: 42 43 44 ...", one character a token. ---

ALPHABET = "\n :0123456789updown"
NUMBER_OF = {character: number for number, character in enumerate(ALPHABET)}
LAYERS, HEADS, DIM, NEAR = 2, 4, 16, 32
PAGE, CHUNK = 8, 32  # tokens of a page of the cache, and the most of a prompt in one pass
causal = masks.causal()


class Counter(nn.Module):
    """A transformer whose score mod is a learned bias by distance; its caller attends."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * DIM
        self.embed = nn.Embedding(len(ALPHABET), width)
        nn.init.normal_(self.embed.weight, std=0.1)
        slopes = torch.linspace(0, 0.5, HEADS)[:, None]
        self.near = nn.ParameterList(-slopes * torch.arange(NEAR) for _ in range(LAYERS))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(LAYERS))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(LAYERS))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(LAYERS))
        self.back = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(LAYERS))

    def bias(self, layer: int) -> Callable[..., Tensor]:
        table = self.near[layer]

        def near(score, b, h, q_idx, kv_idx):
            return score + table[h, (q_idx - kv_idx).clamp(0, NEAR - 1)]

        return near

    def forward(self, tokens: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Logits [..., T, characters] of tokens [..., T]; q, k and v are [..., T, heads, DIM]."""
        x = self.embed(tokens)
        for layer in range(LAYERS):
            qkv = self.qkv[layer](F.layer_norm(x, x.shape[-1:]))
            q, k, v = qkv.unflatten(-1, (3, HEADS, DIM)).unbind(-3)
            x = x + self.out[layer](attend(layer, q, k, v).flatten(-2))
            x = x + self.back[layer](F.gelu(self.wide[layer](F.layer_norm(x, x.shape[-1:]))))
        return F.layer_norm(x, x.shape[-1:]) @ self.embed.weight.T


def prompt(start: int, by: int) -> str:
    return f"\n{'up' if by > 0 else 'down'} {start:02}:"


def counted(start: int, by: int, length: int) -> str:
    """The text that the model learns, and by which it is checked."""
    numbers = (f" {(start + by * i) % 100:02}" for i in range(1, length))
    return (prompt(start, by) + "".join(numbers))[:length]


def train(steps: int = 160, rows: int = 12, length: int = 64) -> Counter:
    model, rng = Counter(), random.Random(0)
    mask = anyflex.create_block_mask(causal, None, None, length, length)

    def attend(layer: int, *qkv: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in qkv)
        return anyflex.flex_attention(q, k, v, model.bias(layer), mask).transpose(1, 2)

    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        texts = [counted(rng.randrange(100), rng.choice((-1, 1)), length + 1) for _ in range(rows)]
        tokens = torch.tensor([[NUMBER_OF[each] for each in text] for text in texts])
        logits = model(tokens[:, :-1], attend)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"trained {steps} steps, loss {loss.item():.3f}")
    return model.requires_grad_(False)


# --- The scheduler: whose tokens are in the next forward pass. ---


@dataclass(eq=False)
class Request:
    """A prompt and what was drawn after it, up to `most` tokens; `drawn` is on its way out."""

    tokens: list[int]
    most: int
    drawn: asyncio.Queue[dict | BaseException] = field(default_factory=asyncio.Queue)
    slot: int = -1
    cancelled: bool = False


class Scheduler:
    """Requests that wait, and those that have a slot of the cache, the oldest first.

    Each pass feeds all that run: one token of each that decodes, and a chunk of each prompt. Where
    pages lack the youngest is preempted: it gives its pages back and waits again. They stay
    findable until somebody takes them, so what it had may cost nothing the second time.
    """

    def __init__(self, model: Counter, slots: int = 4, pages: int = 24) -> None:
        self.model, self.slots, self.pages = model, slots, pages
        self.cache = anyflex.PagedKVCache(LAYERS, pages, PAGE, HEADS, DIM, slots=slots)
        self.longest = pages * PAGE  # a request that runs alone must fit
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.passes = self.drawn = self.fed = self.found = self.hits = self.preempted = 0

    def turn(self) -> list[tuple[Request, dict]]:
        """Run one forward pass, and return what was drawn."""
        for request in [each for each in self.running if each.cancelled]:
            self.leave(request)
        self.admit()
        if not self.running:
            return []
        while (step := self.cache.step(plan := self.plan())) is None:
            self.waiting.appendleft(self.running[-1])
            self.leave(self.running[-1])
            self.preempted += 1
        tokens: list[int] = []
        for request, (slot, count) in zip(self.running, plan, strict=True):
            end = self.cache.length(slot)  # the new tokens included
            tokens += request.tokens[end - count : end]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.append(step, layer, k, v)
            return self.cache.attend(step, layer, q, self.model.bias(layer), causal)

        logits = self.model(torch.tensor(tokens), attend)
        last = torch.tensor([count for _, count in plan]).cumsum(0) - 1
        best = logits[last].log_softmax(-1).max(-1)
        self.passes += 1
        self.fed += len(tokens)
        drawn = []
        results = best.indices.tolist(), best.values.tolist()
        for request, token, logprob in zip(list(self.running), *results, strict=True):
            # The pass has run in all layers: whole pages can be found from now on.
            self.cache.commit(request.slot, request.tokens)
            if self.cache.length(request.slot) < len(request.tokens):
                continue  # the prompt's next chunk follows
            request.tokens.append(token)
            got = {"pass": self.passes, "text": ALPHABET[token], "logprob": logprob}
            drawn.append((request, got))
            if len(request.tokens) == request.most:
                self.leave(request)
        self.drawn += len(drawn)
        return drawn

    def admit(self) -> None:
        """Give slots to those that wait, as long as there are pages for their prompts."""
        while self.waiting and len(self.running) < self.slots:
            if self.running and len(self.waiting[0].tokens) > self.cache.free_pages * PAGE:
                return
            request = self.waiting.popleft()
            request.slot, found = self.cache.prefix(request.tokens)
            self.hits, self.found = self.hits + (found > 0), self.found + found
            self.running.append(request)

    def plan(self) -> list[tuple[int, int]]:
        """Slot and number of new tokens of each that runs. Long prompts come in chunks."""
        return [
            (each.slot, min(CHUNK, len(each.tokens) - self.cache.length(each.slot)))
            for each in self.running
        ]

    def leave(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.close(request.slot)


# --- The door: HTTP requests in, lines of JSON out. ---


class Door:
    """An ASGI app around a scheduler: `POST /generate` streams lines of JSON."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.wake = scheduler, asyncio.Event()
        self.error: BaseException | None = None
        self.thread = ThreadPoolExecutor(1)  # its own, since clients here fill asyncio's
        self.app = Starlette(routes=[Route("/generate", self.generate, methods=["POST"])])

    async def run(self) -> None:
        """Turn the scheduler as long as there is work, in a thread: the door stays open."""
        scheduler, loop = self.scheduler, asyncio.get_running_loop()
        began, passes, drawn = time.monotonic(), 0, 0
        while True:
            if not scheduler.waiting and not scheduler.running:
                self.wake.clear()
                await self.wake.wait()
            try:
                turn = await loop.run_in_executor(self.thread, scheduler.turn)
            except BaseException as error:  # clients would wait for ever
                self.error = error
                for request in (*scheduler.waiting, *scheduler.running):
                    request.drawn.put_nowait(error)
                raise
            for request, got in turn:
                request.drawn.put_nowait(got)
            if scheduler.passes >= passes + 40:
                rate = (scheduler.drawn - drawn) / (time.monotonic() - began)
                began, passes, drawn = time.monotonic(), scheduler.passes, scheduler.drawn
                who = f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting"
                left = f"{scheduler.cache.free_pages} of {scheduler.pages} pages free"
                print(f"pass {passes}: {who}, {left}, {rate:.0f} tokens/s", flush=True)

    async def generate(self, asked: HttpRequest) -> Response:
        try:
            body = await asked.json()
            tokens = [NUMBER_OF[character] for character in body["prompt"]]
            most = len(tokens) + int(body["tokens"])
            if not 0 < len(tokens) < most <= self.scheduler.longest:
                raise ValueError(f"{most} tokens, which must be 2 to {self.scheduler.longest}")
        except (ValueError, KeyError, TypeError) as error:
            cure = f'send {{"prompt": TEXT, "tokens": NUMBER}}, characters of {ALPHABET!r}'
            return JSONResponse({"error": f"{error!r}: {cure}"}, status_code=400)
        if self.error is not None:
            raise self.error
        request = Request(tokens, most)
        self.scheduler.waiting.append(request)
        self.wake.set()
        return StreamingResponse(self.lines(request, most - len(tokens)))

    async def lines(self, request: Request, count: int) -> AsyncIterator[str]:
        try:
            for _ in range(count):
                got = await request.drawn.get()
                if isinstance(got, BaseException):
                    raise got
                yield json.dumps(got) + "\n"
        finally:
            request.cancelled = True  # the client may have hung up


# --- The built-in clients. ---


def converse(port: int, start: int, by: int) -> list[dict]:
    """Ask twice: the second prompt begins with the first answer, which may be found again."""
    lines: list[dict] = []
    for tokens in (34, 26):
        text = prompt(start, by) + "".join(line["text"] for line in lines)
        body = json.dumps({"prompt": text, "tokens": tokens}).encode()
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/generate", body, 60) as answer:
            lines += [json.loads(line) for line in answer]
    return lines


def check(model: Counter, start: int, by: int, lines: list[dict]) -> bool:
    """Compare the log probabilities with those of plain torch, of the whole text at once."""
    text = prompt(start, by) + "".join(line["text"] for line in lines)
    tokens = torch.tensor([NUMBER_OF[character] for character in text])
    given = len(text) - len(lines)
    distance = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
    dead = torch.where(distance < 0, -torch.inf, 0.0)

    def attend(layer: int, *qkv: Tensor) -> Tensor:
        bias = model.near[layer][:, distance.clamp(0, NEAR - 1)] + dead
        q, k, v = (each.transpose(0, 1) for each in qkv)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(0, 1)

    logprobs = model(tokens, attend).log_softmax(-1)[given - 1 : -1]
    expected = logprobs.gather(-1, tokens[given:, None])[:, 0]
    found = torch.tensor([line["logprob"] for line in lines])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    return text == counted(start, by, len(text))


def side_by_side(answers: dict[tuple[int, int], list[dict]], rows: int = 16) -> None:
    """Print what each client got, one column a client, time downwards."""
    last = max(lines[-1]["pass"] for lines in answers.values())
    each = -(-last // rows)
    print("passes   " + " ".join(f"{prompt(*asked).strip():{each}}" for asked in answers))
    for begin in range(0, last, each):
        span, texts = range(begin + 1, begin + each + 1), []
        for lines in answers.values():
            texts.append("".join(line["text"] for line in lines if line["pass"] in span))
        print(f"{begin:6}   " + " ".join(f"{text:{each}}" for text in texts))


async def main(port: int | None) -> None:
    torch.manual_seed(0)
    scheduler = Scheduler(train())
    door, listening = Door(scheduler), socket.create_server(("127.0.0.1", port or 0))
    server = uvicorn.Server(uvicorn.Config(door.app, log_level="warning"))
    tasks = [asyncio.create_task(each) for each in (server.serve([listening]), door.run())]
    print(f"serving on http://127.0.0.1:{listening.getsockname()[1]}")
    try:
        if port is None:
            await talk(listening.getsockname()[1], scheduler)
        else:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def talk(port: int, scheduler: Scheduler) -> None:
    """Serve some conversations at a time, and print and check them."""
    asked, began = [(41, 1), (7, -1), (95, 1), (20, -1), (63, 1), (80, -1)], time.monotonic()
    talks = [asyncio.to_thread(converse, port, *each) for each in asked]
    answers = dict(zip(asked, await asyncio.gather(*talks), strict=True))
    seconds = time.monotonic() - began
    side_by_side(answers)
    right = sum(check(scheduler.model, *each, lines) for each, lines in answers.items())
    print(
        f"{right} of {len(answers)} counted right, all with plain torch's probabilities\n"
        f"{scheduler.drawn / seconds:.0f} tokens/s, {scheduler.fed / scheduler.passes:.1f} "
        f"tokens a pass, {scheduler.hits} prefixes found with {scheduler.found} tokens, "
        f"{scheduler.preempted} preemptions"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", type=int, metavar="PORT", help="keep serving on this port")
    asyncio.run(main(parser.parse_args().serve))
