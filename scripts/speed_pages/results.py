"""Figures of bench/results: its tables and reports, and its JSON of first calls and masks.

A page that lost a row, a heading or its machine raises; nothing is skipped silently.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "CONTENDERS",
    "CPUS",
    "LENGTHS_WIDTH",
    "PEERS",
    "Cpu",
    "GpuRow",
    "Origin",
    "Plain",
    "ServingRow",
    "block_masks",
    "cpu_first_calls",
    "cpu_groups",
    "cpu_lengths",
    "cpu_origin",
    "gpu_first_calls",
    "gpu_origin",
    "gpu_rows",
    "metal_shares",
    "rows_of_table",
    "serving_rows",
    "torch_first_calls",
]

BENCH = Path(__file__).resolve().parents[2] / "bench"
PEERS = {
    "cuDNN": "cuDNN",
    "torch.flex": "torch flex",
    "flex FLASH": "torch flex, FLASH",
    "FA4": "FlashAttention-4",
}
"""Columns of a GPU page that hold peers, and what charts call them."""
CONTENDERS = {
    "cpu": "anyflex, cpu",
    "torch.flex": "torch flex",
    "torch.sdpa.flash": "SDPA, flash",
    "torch.sdpa.dense_mask": "SDPA, dense mask",
}
"""Contenders of a CPU page's reports, and what charts call them."""
LENGTHS = tuple(
    (mask, dtype) for mask in ("full", "causal", "documents") for dtype in ("float32", "bfloat16")
)
"""Masks and types whose rates by length are shown, of heads of LENGTHS_WIDTH columns."""
LENGTHS_WIDTH = 128
GPU = re.compile(
    r"(?P<device>H\d00)s?\b.*?(?P<torch>torch [\w.+]+), (?P<triton>triton [\w.]+),"
    r".*?(?P<date>\d{4}-\d\d-\d\d), all rows at commit (?P<commit>[0-9a-f]+)"
)
PLAIN = re.compile(
    r"(?P<mask>full|causal) B(?P<batch>\d+) H(?P<heads>\d+) S(?P<length>\d+) D(?P<width>\d+)"
)
"""Cases without mods; those that another clock timed name it behind the head dim."""
GROUP = re.compile(r"^  (?P<name>\S.*?) {2,}(?P<mean>[\d.]+) +(?P<least>[\d.]+)(?: |$)", re.M)
REPORT = re.compile(
    r"^(?P<case>\S.*? S(?P<length>\d+) D(?P<width>\d+)) (?P<dtype>\w+), (?P<direction>\w+) \("
)
TIMED = re.compile(r"^  (?P<name>\S+)(?: \(peer\))? +(?P<ms>[\d.]+) +\S+ +(?P<gflops>[\d.e+]+) ")


@dataclass(frozen=True)
class Origin:
    """Where figures come from.

    Args:
        machine: that ran the calls.
        software: versions, in words.
        date: of the run.
        commit: of the sources, or several in words.
        file: in bench/results, or below bench.
    """

    machine: str
    software: str
    date: str
    commit: str
    file: str

    def __str__(self) -> str:
        facts = (self.software, self.date, self.commit and f"commit {self.commit}")
        return ", ".join((self.machine, *filter(None, facts))) + f"; bench/{self.file}"


@dataclass(frozen=True)
class Plain:
    """Row of a GPU page without mods.

    Args:
        mask: "full" or "causal".
        length, width: of the sequence in tokens, and of the head.
        teraflops: anyflex's rate in TFLOP/s.
    """

    mask: str
    length: int
    width: int
    teraflops: float


@dataclass(frozen=True)
class GpuRow:
    """Row of a GPU page's first table.

    Args:
        case: mask or mod, shape and head dim.
        direction: "forward" or "backward".
        milliseconds: that anyflex takes.
        peers: how many times as long each peer takes, by column of the page.
    """

    case: str
    direction: str
    milliseconds: float
    peers: Mapping[str, float]

    @property
    def fastest(self) -> tuple[str, float]:
        """Peer that takes the shortest time, and how many times anyflex's that is."""
        return min(self.peers.items(), key=lambda item: item[1])

    @property
    def plain(self) -> Plain | None:
        """Mask, length, head dim and rate, if the case has no mods."""
        found = PLAIN.fullmatch(self.case)
        if found is None:
            return None
        batch, heads, length, width = (
            int(found[name]) for name in ("batch", "heads", "length", "width")
        )
        live = length * length if found["mask"] == "full" else length * (length + 1) // 2
        # Two products of all live pairs forward, five backward.
        products = {"forward": 2, "backward": 5}[self.direction]
        operations = products * 2 * batch * heads * live * width
        return Plain(found["mask"], length, width, operations / self.milliseconds / 1e9)


def _text(name: str) -> str:
    return (BENCH / name).read_text(encoding="utf-8")


def _json(name: str) -> Any:
    return json.loads(_text(name))


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def gpu_origin(name: str) -> Origin:
    """Return what a GPU page says of its machine before its first table.

    Raises:
        ValueError: device, versions, date or commit is missing.
    """
    found = GPU.search(" ".join(_text(f"results/{name}").partition("\n|")[0].split()))
    if found is None:
        raise ValueError(f"{name} doesn't begin with its machine, versions, date and commit")
    software = f"{found['torch']}, {found['triton']}"
    device = f"one NVIDIA {found['device']}"
    return Origin(device, software, found["date"], found["commit"], f"results/{name}")


def gpu_rows(name: str, backend: str = "cuda") -> list[GpuRow]:
    """Return the rows of a GPU page's first table, in its order.

    Raises:
        ValueError: the table has no column of the backend's times, or a cell isn't a number.
    """
    return rows_of_table(_text(f"results/{name}"), backend)


def rows_of_table(page: str, backend: str) -> list[GpuRow]:
    """Return the rows of the first table of a page's text; see `gpu_rows`."""
    lines = page[page.index("\n| case |") + 1 :].split("\n\n")[0].splitlines()
    head = _cells(lines[0])
    time = head.index(f"`{backend}`, ms")
    rows = []
    for line in lines[2:]:
        cells = _cells(line)
        row = dict(zip(head, cells, strict=True))
        peers = {peer: float(row[peer]) for peer in PEERS if row[peer]}
        rows.append(GpuRow(row["case"], row["direction"], float(cells[time]), peers))
    return rows


def gpu_first_calls(name: str) -> tuple[Origin, dict[str, tuple[float, float]]]:
    """Return origin, and for each state of process and caches the median seconds of forward and
    of backward."""
    report = _json(f"results/{name}")
    origin = _origin_of(report, name)
    seconds = {}
    for state, runs in report["seconds"].items():
        forward, backward = (
            statistics.median(run[direction] for run in runs)
            for direction in ("forward", "backward")
        )
        seconds[state] = forward, backward
    return origin, seconds


def _origin_of(report: Mapping[str, Any], name: str) -> Origin:
    machine, versions = report["machine"], report["versions"]
    return Origin(
        f"one {machine['device_name']}",
        f"torch {versions['torch']}, triton {versions['triton']}",
        report["date"][:10],
        report["commit"],
        f"results/{name}",
    )


@dataclass(frozen=True)
class ServingRow:
    """Row of packed sequences or pages.

    Args:
        group: what is like in a group's rows, in words.
        case: sequences and keys, what a mod does, how keys are stored.
        shape: query heads, heads of keys, head dim; page.
        microseconds: that `cuda` takes for a layer.
        gb_per_s: at which it reads keys and values.
        ratios: how many times as long others take.
    """

    group: str
    case: str
    shape: str
    microseconds: float
    gb_per_s: float
    ratios: Mapping[str, float]

    @property
    def fastest(self) -> tuple[str, float] | None:
        """The fastest peer and its ratio; None where none was measured."""
        peers = {name: ratio for name, ratio in self.ratios.items() if "cuda" not in name}
        return min(peers.items(), key=lambda each: each[1]) if peers else None


def serving_rows(name: str) -> tuple[Origin, list[ServingRow]]:
    """Return origin and rows of a report of `bench/serving_targets.py`."""
    report = _json(f"results/{name}")
    rows = []
    for row in report["rows"]:
        own = row["contenders"]["cuda"]
        others = {
            contender: found["ratio"]
            for contender, found in row["contenders"].items()
            if contender != "cuda"
        }
        words = " ".join(filter(None, (row["row"], row["mod"], row["storage"])))
        page = f"page {row['page']}" if row["page"] else "packed"
        shape = f"{'/'.join(map(str, [*row['heads'], row['dim']]))}, {page}"
        rate = row["bytes"] / own["us"] / 1e3
        rows.append(ServingRow(row["group"], words, shape, own["us"], rate, others))
    return _origin_of(report, name), rows


@dataclass(frozen=True)
class Cpu:
    """Processor, and where its groups of calls stand.

    Args:
        name: of the processor and the threads.
        page: in bench/results.
        heading: of the section that holds the groups; None: the whole page does.
        threads: of the runs.
        commits: of the runs, as the section names them.
    """

    name: str
    page: str
    heading: str | None
    threads: int
    commits: tuple[str, ...]

    def section(self) -> str:
        """Text that holds the groups."""
        page = _text(f"results/{self.page}")
        if self.heading is None:
            return page
        _, between, rest = page.partition(f"\n## {self.heading}\n")
        if not between:
            raise ValueError(f"{self.page} has no section {self.heading!r}")
        return rest.partition("\n## ")[0]


CPUS = (
    Cpu("Xeon with AMX, 16 threads", "cpu_xeon_16_cores.md", "Today's kernels", 16, ("bdbe7b9",)),
    Cpu(
        "Xeon with AMX, 1 thread",
        "cpu_xeon_16_cores.md",
        "Today's kernels",
        1,
        ("bdbe7b9", "910c033"),
    ),
    Cpu(
        "EPYC Zen 5, 1 thread",
        "cpu_zen5_2_cores.md",
        "Today's kernels",
        1,
        ("cc0f5ae", "c8eed09"),
    ),
    Cpu("EPYC Zen 4, 2 threads", "cpu_zen4_2_cores.md", "Two threads", 2, ("06bfeab",)),
    Cpu("EPYC with AVX2 only, 1 thread", "cpu_avx2_2_cores.md", None, 1, ("fbf635b",)),
)


def cpu_origin(cpu: Cpu) -> Origin:
    """Return date and commits of a processor's groups.

    Raises:
        ValueError: the section doesn't name the date or one of the commits.
    """
    section = cpu.section()
    date = re.search(r"\d{4}-\d\d-\d\d", section)
    if date is None or not all(commit in section for commit in cpu.commits):
        raise ValueError(f"{cpu.page} doesn't say the date, or not all of {cpu.commits}")
    commits = " and ".join(cpu.commits)
    return Origin(cpu.name, "", date[0], commits, f"results/{cpu.page}")


def cpu_groups(cpu: Cpu) -> dict[str, tuple[float, float]]:
    """Return each group's speed by the fastest peer's: geometric mean and least of its rows.
    Decoding's groups that compare with something else are left out."""
    found: dict[str, tuple[float, float]] = {}
    for block in re.findall(r"```text\n(.*?)```", cpu.section(), flags=re.S):
        parts = re.split(r"^\w+, threads (\d+), wall, .*$", block, flags=re.M)
        for threads, part in zip(parts[1::2], parts[2::2], strict=True):
            if int(threads) == cpu.threads:
                for row in GROUP.finditer(part):
                    found.setdefault(row["name"], (float(row["mean"]), float(row["least"])))
    found = {name: speeds for name, speeds in found.items() if "," not in name}
    if not found:
        raise ValueError(f"{cpu.page} has no groups with {cpu.threads} threads")
    return found


def cpu_lengths() -> tuple[Origin, dict[str, dict[str, dict[int, float]]]]:
    """Return origin, and GFLOP/s of forward on one thread by mask and type, contender and length.

    Raises:
        KeyError: the page has no report of one of LENGTHS.
    """
    file = "cpu_xeon_2_cores.md"
    page = _text(f"results/{file}")
    began = page.index("Xeon(R) Processor, 1 threads; ")
    block = page[began : page.index(" 2 threads; ", began)]
    head = re.search(r"threads; (torch \S+), .*? commit (\w{7})", block)
    date = re.search(r"\d{4}-\d\d-\d\d", page)
    if head is None or date is None:
        raise ValueError(f"{file} doesn't say its versions, date and commit")
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for report in block.split("\n\n"):
        case = REPORT.match(report)
        if case is None or case["direction"] != "forward" or int(case["width"]) != LENGTHS_WIDTH:
            continue
        rates = found.setdefault((case["case"].split(" S")[0], case["dtype"]), {})
        for line in report.splitlines()[2:]:
            timed = TIMED.match(line)
            if timed is not None:
                name = CONTENDERS[timed["name"]]
                rates.setdefault(name, {})[int(case["length"])] = float(timed["gflops"])
    chosen = {", ".join(key): found[key] for key in LENGTHS}
    machine = "Xeon with AMX, 1 thread"
    return Origin(machine, head[1], date[0], head[2], f"results/{file}"), chosen


def cpu_first_calls() -> tuple[Origin, dict[str, tuple[float, float | None]]]:
    """Return origin, and by name of what was timed the median and its limit, if any, in
    seconds."""
    report = _json("results/cpu_first_calls.json")
    machine = "Xeon with AMX, shared, 1 thread, CPU time"
    if report["clock"] != "thread_time_ns":
        raise ValueError("cpu_first_calls.json is of another clock than the charts name")
    origin = Origin(
        machine,
        f"torch {report['versions']['torch'].removesuffix('+cpu')}",
        report["date"][:10],
        report["commit"][:7],
        "results/cpu_first_calls.json",
    )
    seconds = report["seconds"].items()
    return origin, {name: (each["median"], each["limit"]) for name, each in seconds}


def torch_first_calls() -> tuple[Origin, float, float]:
    """Return origin, and seconds of the first call that torch compiles and that the reference
    backend computes."""
    page = _text("versus_torch.md")
    row = re.search(r"^\| first call .*?\| ([\d.]+) s \| ([\d.]+) s \|$", page, flags=re.M)
    head = re.search(r"(\d{4}-\d\d-\d\d), .*?(torch [\d.]+)", page, flags=re.S)
    if row is None or head is None:
        raise ValueError("versus_torch.md has no first call, or doesn't say its date and torch")
    origin = Origin("Xeon, 1 thread, CPU time", head[2], head[1], "", "versus_torch.md")
    return origin, float(row[1]), float(row[2])


def block_masks() -> tuple[Origin, list[dict[str, Any]]]:
    """Return origin and the rows of block_masks.json: mask, sizes, ms and torch_ms, or None."""
    report = _json("results/block_masks.json")
    origin = Origin(
        "Xeon, 1 thread, CPU time",
        f"torch {report['versions']['torch'].removesuffix('+cpu')}",
        "",
        report["commit"],
        "results/block_masks.json",
    )
    return origin, report["rows"]


def metal_shares() -> dict[str, dict[str, dict[int, float]]]:
    """Return the cost model's useful share in percent, by type, kernel and head dim."""
    page = _text("results/mps_cost_model.md")
    found: dict[str, dict[str, dict[int, float]]] = {}
    for title, table in re.findall(r"^### (.*)\n\n((?:\|.*\n)+)", page, flags=re.M):
        head, _, *rows = (_cells(line) for line in table.splitlines())
        for cells in rows:
            row = dict(zip(head, cells, strict=True))
            share = float(row["useful share"].rstrip("%"))
            of_kernel = found.setdefault(title, {}).setdefault(row["kernel"], {})
            of_kernel[int(row["head dim"])] = share
    if not found:
        raise ValueError("mps_cost_model.md has no tables of shares")
    return found
