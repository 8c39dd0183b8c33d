"""Host side of the interface on which other backends build their kernel classes.

=====================  ============================================================================
A kernel class         `TritonKernel` chooses and launches the portable kernels, and is the base of
                       others; it is constructed with `KernelInputs`
Programs of a spec     `Programs` compiles kernels for a spec, with `Mods`, the user's functions,
                       `mask_rows`, a block mask's runs; `Arguments` and `types_of` describe a
                       kernel's parameters; `padded`
One program            `Program` with `Options` and `Types`; `TellsFrontEnd` for another language
Launches               `Launch`, `FixedLaunch`, `launch_all`; `compile_missing` and
                       `compile_with_next`
Tensors                `layout_of` and `Layout`, `Boxes` for descriptors, `Part` of another tensor,
                       `pointer_type`
Packed sequences       `packed_values`, arguments of kernels; `STORED_TYPES`
Parts of a backward    `backward_values`, `expected_backward`, `with_rows`, `integer_specs`
Text of mods           `write_source`, `source_for`, `mask_scores_source`, `load_module`;
                       `pair_reads_source` and `pair_kinds`
=====================  ============================================================================

It needs Triton. Names may be added; what is here keeps its meaning for the packages of the same
release.
"""

from __future__ import annotations

from anyflex_triton.arguments import (
    BYTES,
    Boxes,
    Layout,
    Part,
    Types,
    layout_like,
    layout_of,
    pointer_type,
)
from anyflex_triton.backward_call import (
    backward_key,
    backward_sizes,
    backward_values,
    expected_backward,
    integer_specs,
    key_sums_specs,
    row_values_launch,
    split_arguments,
    sums_launch,
)
from anyflex_triton.compiled_files import CompiledFiles
from anyflex_triton.configs import Target
from anyflex_triton.forward_call import NeededNext, compile_with_next, packed_values
from anyflex_triton.kernel import TritonKernel
from anyflex_triton.kernel_arguments import GIVEN, Arguments, types_of
from anyflex_triton.kernel_signatures import (
    STORED_TYPES,
    KernelInputs,
    Mods,
    Programs,
    call_sizes,
    key_head_group,
    layouts_of,
    or_else,
    output_values,
    padded,
    wanted_outputs,
)
from anyflex_triton.launch import FixedLaunch, Launch, compile_missing, launch_all
from anyflex_triton.mask_refinement import mask_rows, with_rows
from anyflex_triton.mods import (
    IMPORTED_OPERATIONS,
    captured_additions,
    load_module,
    mask_scores_source,
    source_for,
    write_source,
)
from anyflex_triton.pair_reads import pair_kinds, pair_reads_source
from anyflex_triton.program import Options, Program, TellsFrontEnd

__all__ = [
    "BYTES",
    "GIVEN",
    "IMPORTED_OPERATIONS",
    "STORED_TYPES",
    "Arguments",
    "Boxes",
    "CompiledFiles",
    "FixedLaunch",
    "KernelInputs",
    "Launch",
    "Layout",
    "Mods",
    "NeededNext",
    "Options",
    "Part",
    "Program",
    "Programs",
    "Target",
    "TellsFrontEnd",
    "TritonKernel",
    "Types",
    "backward_key",
    "backward_sizes",
    "backward_values",
    "call_sizes",
    "captured_additions",
    "compile_missing",
    "compile_with_next",
    "expected_backward",
    "integer_specs",
    "key_head_group",
    "key_sums_specs",
    "launch_all",
    "layout_like",
    "layout_of",
    "layouts_of",
    "load_module",
    "mask_rows",
    "mask_scores_source",
    "or_else",
    "output_values",
    "packed_values",
    "padded",
    "pair_kinds",
    "pair_reads_source",
    "pointer_type",
    "row_values_launch",
    "source_for",
    "split_arguments",
    "sums_launch",
    "types_of",
    "wanted_outputs",
    "with_rows",
    "write_source",
]
