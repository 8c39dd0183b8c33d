"""The kit holds the declared types of mod-graph nodes: `Capabilities.node_dtypes`."""

from __future__ import annotations

from pathlib import Path

from anyflex.testing.cases import every_case
from anyflex.testing.runner import Outcome, run_case
from anyflex.testing.session import open_session
from tests.testing.faults.fault import Change, example

TYPES = "    types={dtype: str(dtype) for dtype in DTYPES.values()},\n"
WITHOUT = Change(
    "mods.py", TYPES, TYPES.replace("()}", "() if dtype not in (torch.float64, torch.int8)}")
)
WIDER = Change("mods.py", TYPES, TYPES.replace("str(dtype) for", "_held(dtype) for"))
HELD = Change(
    "mods.py",
    "TORCH: Lowering",
    "def _held(dtype):\n"
    "    return 'torch.int16' if dtype is torch.int8 else str(dtype)\n\n\n"
    "TORCH: Lowering",
)
UNASKED = Change(
    "backend.py",
    "    def fingerprint(self) -> str:",
    "    def supports(self, spec: Spec) -> Decision:\n"
    "        decision = super().supports(spec)\n"
    "        return Accepted() if 'computes in' in str(decision) else decision\n\n"
    "    def fingerprint(self) -> str:",
)


def outcome(folder: Path, case: str, *changes: Change) -> Outcome:
    with (
        example(folder, changes) as backend,
        open_session("cpu.example", backend_class=backend) as session,
    ):
        return run_case(session, every_case()[case])


def test_types_that_are_left_out_are_refused(tmp_path: Path) -> None:
    for case in ("declared/node_dtypes", "refusals/undeclared"):
        assert outcome(tmp_path / case, case, WITHOUT).status == "passed"


def test_a_type_that_is_computed_in_a_wider_one_is_caught(tmp_path: Path) -> None:
    assert outcome(tmp_path, "declared/node_dtypes", WIDER, HELD).status == "failed"


def test_a_mod_that_is_accepted_in_an_undeclared_type_is_caught(tmp_path: Path) -> None:
    found = outcome(tmp_path, "refusals/undeclared", WITHOUT, UNASKED)
    assert found.status == "failed"
    assert "mods in torch.int8" in found.detail or "computes in int8" in found.detail
