"""The speed pages and their charts say what the committed results say, and nothing else."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.generated_tables import with_current_tables
from scripts.speed_pages import results
from scripts.speed_pages.tables import PAGES, TABLES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "charts"
STORED = sorted(path.name for path in FOLDER.iterdir())
LARGEST = 64 * 1024
SVG = "{http://www.w3.org/2000/svg}"


def words(chart: str) -> list[str]:
    """Texts of a chart: with the description, which has every value, all that it says."""
    return [text for each in ElementTree.fromstring(chart).iter() if (text := each.text or "")]


def pinned() -> str:
    constraints = (ROOT / "constraints-dev.txt").read_text(encoding="utf-8")
    found = re.search(r"^matplotlib==([\d.]+)", constraints, flags=re.M)
    assert found is not None
    return found[1]


@pytest.fixture
def edited_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy of the results that a test may change, read in the place of the committed ones."""
    copy = tmp_path / "bench"
    copy.mkdir()
    shutil.copytree(results.BENCH / "results", copy / "results")
    monkeypatch.setattr(results, "BENCH", copy)
    return copy


def replace_in(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize("name", STORED)
def test_a_chart_is_current(name: str) -> None:
    matplotlib = pytest.importorskip("matplotlib", reason="the extra demo is not installed")
    from scripts.speed_pages.charts import CHARTS

    stored = (FOLDER / name).read_text(encoding="utf-8")
    drawn = CHARTS[name]()
    assert words(stored) == words(drawn), "run `python -m scripts.speed_pages`"
    # Other versions of matplotlib place text a little differently.
    if matplotlib.__version__ == pinned():
        assert stored == drawn, "run `python -m scripts.speed_pages`"


@pytest.mark.parametrize("name", STORED)
def test_a_chart_is_small_has_a_title_and_is_shown(name: str) -> None:
    stored = (FOLDER / name).read_text(encoding="utf-8")
    assert len(stored.encode()) < LARGEST
    root = ElementTree.fromstring(stored)
    described = root.get("aria-labelledby", "").split()
    assert [root.find(f"{SVG}{each}") is not None for each in described] == [True, True]
    pages = (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
    assert any(f"charts/{name})" in page.read_text(encoding="utf-8") for page in pages)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_are_current(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == with_current_tables(text, TABLES), "run `python -m scripts.speed_pages`"


def test_every_table_is_shown_and_the_pages_can_be_found() -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert set(re.findall(r"<!-- table (\w+)", shown)) == set(TABLES)
    assert "](speed/index.md)" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    assert "](docs/speed/index.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_slower_row_is_told_as_plainly_as_others() -> None:
    page = "\n".join(
        [
            "",
            "| case | direction | `cuda`, ms | cuDNN | torch.flex | flex FLASH | FA4 |",
            "|---|---|---|---|---|---|---|",
            "| full B2 H4 S1024 D64 | forward | 2.000 | 0.50 | 3.00 |  | 1.50 |",
            "| decode | forward | 1.000 |  | 3.00 | 2.50 |  |",
            "",
            "| case | direction | `cuda`, ms |",
        ]
    )
    behind, ahead = results.rows_of_table(page, "cuda")
    assert behind.fastest == ("cuDNN", 0.5)
    assert ahead.fastest == ("flex FLASH", 2.5)
    assert ahead.plain is None
    assert behind.plain is not None
    # Two products of 2 x 4 x 1024^2 pairs with 64 columns, a multiply and an add each, in 2 ms.
    assert behind.plain.teraflops == pytest.approx(4 * 2 * 4 * 1024**2 * 64 / 2e-3 / 1e12)


def test_rates_agree_with_those_that_the_bench_prints() -> None:
    """The peers' page has GFLOP/s of the bench beside milliseconds."""
    page = (results.BENCH / "results" / "h200_peers.md").read_text(encoding="utf-8")
    found = re.search(
        r"^causal (B4 H16 S8192 D128) bfloat16, backward .*\n.*\n"
        r"  cuda\.torch \(peer\) +(?P<ms>[\d.]+) +\S+ +(?P<gflops>\S+)",
        page,
        flags=re.M,
    )
    assert found is not None
    row = results.GpuRow(f"causal {found[1]}", "backward", float(found["ms"]), {})
    assert row.plain is not None
    assert row.plain.teraflops == pytest.approx(float(found["gflops"]) / 1e3, rel=2e-3)


def test_a_changed_result_changes_chart_and_table(edited_results: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra demo is not installed")
    from scripts.speed_pages.charts import CHARTS

    row = "| causal B4 H16 S8192 D128 | forward | 1.726 | 1.608 to 1.799 | 1.15 | 1.87 |"
    replace_in(
        edited_results / "results" / "h200_cuda.md", row, row.replace("| 1.87 |", "| 1.77 |")
    )
    chart = (FOLDER / "h200.svg").read_text(encoding="utf-8")
    assert words(CHARTS["h200.svg"]()) != words(chart)
    replace_in(edited_results / "results" / "cpu_avx2_2_cores.md", "1.10   1.06", "0.97   0.91")
    assert "| 0.97, 0.91 |" in TABLES["cpu_groups"]()


def test_a_result_without_its_origin_or_section_is_refused(edited_results: Path) -> None:
    folder = edited_results / "results"
    replace_in(folder / "h200_cuda.md", "all rows at commit", "at")
    with pytest.raises(ValueError, match="machine, versions, date and commit"):
        results.gpu_origin("h200_cuda.md")
    replace_in(folder / "cpu_zen5_2_cores.md", "## Today's kernels", "## Kernels")
    with pytest.raises(ValueError, match='no section "Today\'s kernels"'):
        TABLES["cpu_groups"]()
    replace_in(folder / "cpu_avx2_2_cores.md", "commit fbf635b", "a commit")
    with pytest.raises(ValueError, match="date, or not all of .'fbf635b'"):
        results.cpu_origin(results.CPUS[-1])
    replace_in(folder / "cpu_first_calls.json", "thread_time_ns", "perf_counter_ns")
    with pytest.raises(ValueError, match="of another clock"):
        results.cpu_first_calls()


def test_no_value_is_left_out_beyond_an_axis() -> None:
    pytest.importorskip("matplotlib", reason="the extra demo is not installed")
    from scripts.speed_pages.drawing import Heading, dots

    panels = {"forward": {"a": {"ours": 1.0}, "b": {"ours": 9.0}}}
    with pytest.raises(ValueError, match="would leave out values beyond"):
        dots(Heading("speed", "times", []), panels, (1, 2, 4), left=1)


def test_colours_can_be_read_on_white_and_on_the_dark_theme() -> None:
    pytest.importorskip("matplotlib", reason="the extra demo is not installed")
    from scripts.speed_pages.drawing import COLORS, INK

    def luminance(color: str) -> float:
        parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    def contrast(color: str, ground: str) -> float:
        darker, lighter = sorted((luminance(color), luminance(ground)))
        return (lighter + 0.05) / (darker + 0.05)

    for ground in ("#ffffff", "#1e2129"):
        assert contrast(INK, ground) >= 3.9
        # WCAG's minimum for graphics.
        assert min(contrast(color, ground) for color in COLORS) >= 3
