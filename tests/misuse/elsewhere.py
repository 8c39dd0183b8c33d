"""Rows of the misuse list that other tests cover, or that nothing here can."""

from __future__ import annotations

__all__ = ["ELSEWHERE", "LATER"]

ELSEWHERE: dict[int, str] = {
    # number: "file under tests/::test"
    45: "",
    126: "",
    127: "",
    128: "",
    132: "",
    133: "",
    134: "",
    135: "",
    136: "",
    137: "",
    138: "",
    139: "",
    140: "",
    141: "",
    142: "",
    143: "",
    145: "",
    146: "",
    147: "",
    153: "misuse/test_processes.py::test_first_call_from_sixteen_threads_at_once",
    154: "misuse/test_processes.py::test_a_call_after_a_fork",
    155: "misuse/test_processes.py::test_a_call_during_interpreter_shutdown",
    156: "",
    157: "",
}
"""Row -> the test that covers it."""

LATER: dict[int, str] = {
    47: "shared memory needs a GPU backend: with the first one",
    124: "a device without float64: with the mps backend",
    144: "the conformance kit's check of output shapes: with the kit",
    148: "install_torch: with the hook into torch",
    149: "uninstall_torch: with the hook into torch",
    150: "install_torch: with the hook into torch",
    151: "uninstall_torch: with the hook into torch",
    152: "import order: with the hook into torch",
}
"""Row -> why no test can cover it yet."""
