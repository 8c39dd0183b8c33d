"""`anyflex new-plugin` writes a package that works, or says why it doesn't."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

import anyflex
from anyflex.cli import new_plugin
from anyflex.cli.exit_codes import ExitCode
from anyflex.cli.main import main
from tests.plugins.installed import EXAMPLE, entry_points, run_tests
from tests.soak import only_in_soak


def written(folder: Path, name: str, *arguments: str) -> Path:
    code = main(["new-plugin", name, "--into", str(folder), *arguments])
    assert code == ExitCode.OK
    return folder / f"anyflex-{name}"


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        pytest.param(
            ("--device", "cpu", "--variant", "warp"),
            "cpu.warp",
            marks=only_in_soak("tests/packaging installs such a plugin and runs its tests"),
        ),
        # This machine has none: CPU tensors pose. No installed backend has that name.
        (("--device", "hpu"), "hpu"),
    ],
)
def test_its_tests_pass_as_they_are(
    arguments: tuple[str, ...],
    backend: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plugin = written(tmp_path, "warp-drive", *arguments)
    printed = capsys.readouterr().out
    assert f"a working backend {backend!r}" in printed
    assert f"  cd {plugin}\n" in printed
    assert entry_points(plugin).splitlines()[1] == (
        f"{backend} = anyflex_warp_drive.backend:WarpDriveBackend"
    )
    folder = tmp_path / "environment"
    assert " passed" in run_tests(
        plugin, folder, "-k", "not float16 and not float64 and not TestConformance"
    )


def test_its_tests_follow_a_smaller_declaration(tmp_path: Path) -> None:
    plugin = written(tmp_path, "little", "--device", "cpu", "--variant", "little")
    file = plugin / "src" / "anyflex_little" / "backend.py"
    text = file.read_text(encoding="utf-8")
    for declared, smaller in (
        ("torch.float16, torch.bfloat16, torch.float32, torch.float64", "torch.float32"),
        ('"v", "captured", "lse"', '"v"'),
        ("TORCH.operations()", 'TORCH.operations() - {"tanh", "mod"}'),
        ("choices=(16, 32, 64, 128, 256, 512)", "choices=(32, 128)"),
    ):
        assert text.count(declared) == 1
        text = text.replace(declared, smaller)
    file.write_text(text, encoding="utf-8")
    chosen = "not TestConformance and not computes"
    printed = run_tests(plugin, tmp_path / "environment", "-k", chosen)
    assert "operation tanh in a mod is not supported" in printed
    assert re.search(r"1[0-9] passed, [45] skipped", printed), printed


def test_nothing_of_the_example_s_name_is_left(tmp_path: Path) -> None:
    plugin = written(tmp_path, "warp", "--device", "cpu", "--variant", "w")
    parts = [path for path in plugin.rglob("*") if path.is_file()]
    assert plugin / "src" / "anyflex_warp" / "py.typed" in parts
    assert plugin / "tests" / "test_attention.py" in parts
    assert 'backend = "cpu.w"' in (plugin / "tests" / "test_conformance.py").read_text("utf-8")
    for path in parts:
        text = path.read_text(encoding="utf-8") + str(path.relative_to(plugin))
        assert not re.search(r"example\b|anyflex.example|Example", text), path


def test_what_tools_left_in_the_template_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template"
    shutil.copytree(EXAMPLE, template, ignore=shutil.ignore_patterns("__pycache__"))
    for clutter in ("src/__pycache__/a.pyc", "tests/__pycache__/b.py", ".venv/c.py", "dist/d.md"):
        (template / clutter).parent.mkdir(parents=True, exist_ok=True)
        (template / clutter).touch()
    monkeypatch.setattr(new_plugin, "_template", lambda: template)
    plugin = written(tmp_path, "warp", "--device", "cpu")
    names = {str(path.relative_to(plugin)) for path in plugin.rglob("*") if path.is_file()}
    assert not [name for name in names if name.endswith(("a.pyc", "b.py", "c.py", "d.md"))]
    assert "pyproject.toml" in names


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("Warp", "--device", "cpu"), "NAME must be lower case letters, digits and single dashes"),
        (("warp_two", "--device", "cpu"), "got 'warp_two'"),
        (("", "--device", "cpu"), "got ''"),
        (("anyflex-warp", "--device", "cpu"), "anyflex-NAME already; give 'warp'"),
        (("anyflex", "--device", "cpu"), "give 'mine'"),
        (("cuda", "--device", "cuda"), "anyflex-cuda is a distribution of anyflex itself"),
        (("warp", "--device", "abacus"), "torch knows no such device type; give a type that"),
        (("warp", "--device", "cuda:1"), "a type has no index; give cuda"),
        (("warp", "--device", "meta"), "no backend computes on meta tensors"),
        (("warp", "--device", "cpu", "--variant", "A b"), "a backend name is"),
        (("warp",), "--device"),
        (("--device", "cpu"), "NAME"),
    ],
)
def test_what_makes_no_sense_is_wrong_usage(
    arguments: tuple[str, ...],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-plugin", *arguments]) == ExitCode.USAGE
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "anyflex-warp").mkdir()
    arguments = ["new-plugin", "warp", "--device", "cpu", "--into", str(tmp_path)]
    assert main(arguments) == ExitCode.USAGE
    assert "anyflex-warp exists; remove it, or choose another NAME" in capsys.readouterr().err
    assert not list((tmp_path / "anyflex-warp").iterdir())


def test_a_folder_that_cannot_be_written_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    arguments = ["new-plugin", "warp", "--device", "cpu", "--into", str(tmp_path / "file")]
    assert main(arguments) == ExitCode.USAGE
    assert "anyflex-warp can't be written: " in capsys.readouterr().err


def test_no_half_of_a_package_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Path.write_text
    count = iter(range(100))

    def failing(path: Path, text: str, encoding: str) -> int:
        if next(count) == 3:
            raise OSError("no space left")
        return write(path, text, encoding=encoding)

    monkeypatch.setattr(Path, "write_text", failing)
    arguments = ["new-plugin", "warp", "--device", "cpu", "--into", str(tmp_path)]
    assert main(arguments) == ExitCode.USAGE
    assert "no space left" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_installation_without_the_template_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(anyflex, "__file__", str(tmp_path / "a" / "anyflex" / "__init__.py"))
    arguments = ["new-plugin", "warp", "--device", "cpu", "--into", str(tmp_path)]
    assert main(arguments) == ExitCode.NOT_RUN
    assert "the template is missing from this installation" in capsys.readouterr().err
