"""Loops are found in disassembled kernels, and spills are attributed to them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "sass_loops", Path(__file__).parents[3] / "bench" / "sass_loops.py"
)
assert _spec is not None and _spec.loader is not None
sass_loops = importlib.util.module_from_spec(_spec)
sys.modules["sass_loops"] = sass_loops
_spec.loader.exec_module(sass_loops)
Loop = sass_loops.Loop

# The kernel has a loop over runs around one over steps, which waits behind the kernel's end; then
# a loop without products, and spills around all of them.
KERNEL = """
        /*0000*/                   STL [R1], R2 ;
        /*0010*/              @!P0 BRA `(.L_x_4) ;
.L_x_0:
        /*0020*/                   LDL R3, [R1] ;
.L_x_1:
        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R4 ;
        /*0040*/              @!P1 BRA `(.L_x_5) ;
.L_x_2:
        /*0050*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0060*/              @!PT LDL.LU R5, [R1+0x4] ;
        /*0070*/               @P2 BRA `(.L_x_1) ;
        /*0080*/               @P3 BRA `(.L_x_0) ;
.L_x_3:
        /*0090*/                   FFMA R6, R6, R6, R7 ;
        /*00a0*/               @P4 BRA `(.L_x_3) ;
.L_x_4:
        /*00b0*/                   LDL R8, [R1] ;
        /*00c0*/                   EXIT ;
.L_x_5:
        /*00d0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R4 ;
        /*00e0*/              @!P1 BRA `(.L_x_5) ;
        /*00f0*/                   BRA `(.L_x_2) ;
.L_x_6:
        /*0100*/                   BRA `(.L_x_6) ;
"""


def test_the_inner_loop_is_found_with_its_far_wait() -> None:
    assert sass_loops.product_loops(KERNEL, ("HGMMA",)) == [Loop(8, 1, 1)]


def test_which_instructions_count_is_the_callers() -> None:
    loops = sass_loops.product_loops(KERNEL, ("HGMMA", "FFMA"))
    assert loops == [Loop(8, 1, 1), Loop(2, 1, 0)]


def test_all_spills_are_counted() -> None:
    assert sass_loops.spill_instructions(KERNEL) == 4


def test_a_kernel_without_products_has_no_such_loops() -> None:
    assert sass_loops.product_loops(KERNEL, ("HMMA",)) == []
