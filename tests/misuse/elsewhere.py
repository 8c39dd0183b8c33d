"""Rows of the misuse list that other tests cover, or that no test here can."""

from __future__ import annotations

__all__ = ["ELSEWHERE", "LATER"]

_BROKEN = (
    "registry/test_plugin_errors.py::test_a_broken_backend_is_named_and_the_next_one_computes"
)

ELSEWHERE: dict[int, str] = {
    # number: "file under tests/::test"
    45: "registry/test_options.py::test_a_key_that_only_another_backend_knows_names_its_owner",
    # Changes in place aren't noticed: a mask is frozen, and its structure can't be assigned.
    89: "core/test_frozen_block_masks.py::test_structure_can_not_be_assigned",
    126: "registry/test_selection.py"
    "::test_a_backend_that_is_not_installed_is_refused_with_the_install_line",
    127: "registry/test_selection.py"
    "::test_an_explicit_backend_of_another_device_is_refused_with_both_devices",
    128: "registry/test_selection.py"
    "::test_an_explicit_backend_never_falls_back_and_says_who_would_take_the_call",
    132: "registry/test_selection.py"
    "::test_an_unknown_name_in_the_variable_is_an_error_at_the_first_call",
    133: "registry/test_selection.py::test_an_unknown_name_in_a_list_of_plugins_warns_once",
    134: "registry/test_selection.py"
    "::test_when_every_backend_is_disabled_the_error_names_the_variable",
    135: "registry/test_selection.py::test_a_strict_registry_raises_for_a_broken_candidate",
    136: "registry/test_selection.py::test_the_value_in_force_stays_when_a_variable_changes_later",
    137: _BROKEN,
    138: "registry/test_hooks.py::test_a_hook_that_does_not_fit_is_refused_with_both_signatures",
    139: "registry/test_discovery.py::test_a_group_of_another_contract_is_listed_and_never_loaded",
    140: "registry/test_discovery.py::test_two_distributions_under_one_name_are_used_by_none",
    141: _BROKEN,
    142: _BROKEN,
    143: _BROKEN,
    144: "testing/test_inspector.py::test_a_broken_promise_of_a_kernel_is_noted",
    145: "registry/test_through_the_api.py"
    "::test_a_backend_registered_later_is_asked_by_the_same_call",
    146: "registry/test_selection.py::test_one_package_cannot_register_a_name_twice",
    147: "registry/test_selection.py::test_a_bad_name_is_refused_at_registration",
    153: "misuse/test_processes.py::test_first_call_from_sixteen_threads_at_once",
    154: "misuse/test_processes.py::test_a_call_after_a_fork",
    155: "misuse/test_processes.py::test_a_call_during_interpreter_shutdown",
    156: "registry/test_disk_cache.py"
    "::test_a_damaged_file_is_compiled_anew_with_one_line_that_names_it",
    157: "registry/test_disk_cache.py"
    "::test_a_folder_that_cannot_be_written_costs_one_warning_and_no_failure",
}
"""Row -> the test that covers it."""

LATER: dict[int, str] = {
    47: "shared memory needs a GPU backend: with the first one",
    124: "a device without float64: with the mps backend",
    148: "install_torch: with the hook into torch",
    149: "uninstall_torch: with the hook into torch",
    150: "install_torch: with the hook into torch",
    151: "uninstall_torch: with the hook into torch",
    152: "import order: with the hook into torch",
}
"""Row -> why no test can cover it yet."""
