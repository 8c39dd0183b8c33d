"""PTX that sets scores to -inf at dead pairs with one select, whatever conditions a mask mod
joins.

LLVM turns a select with two conditions into two selects. In PTX the comparisons' predicates are
combined, and one select follows: under a mask of documents a step takes 684 instructions instead
of 770, and nothing spills.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["choose", "choose_by"]

# Argument lists would be a line an argument.
# fmt: off

@gluon.jit
def choose(scores, full, live):
    """Return scores where live, or all of them if `full`, else -inf. `full` may be None."""
    if full is None:
        return gl.where(live, scores, float("-inf"))
    else:
        # `full` costs less in the second operand than in the condition.
        return gl.where(live, scores, gl.where(full, scores, float("-inf")))


@gluon.jit
def choose_by(TOKENS: gl.constexpr, scores, full, first, columns, operands):
    """Return scores where conditions hold, or all of them if `full`, else -inf.

    Args:
        TOKENS: tokens of `anyflex_triton.mask_conditions`, joined by ``"; "``.
        scores: [rows, columns].
        full: whether all pairs are live, or None.
        first: int32; a key's index is first plus its column.
        columns: int32 [1, columns]: 0, 1, ...
        operands: operands of the tokens; all broadcast with the scores.
    """
    # A thread has columns 8 i + 2 t and 8 i + 2 t + 1, where t depends on the thread alone.
    # Without t a column is a compile-time constant, so the comparisons take immediates.
    KNOWN: gl.constexpr = 2147483641
    known = columns & KNOWN
    own = first + (columns & 6)
    given = operands[:0]
    for i in gl.static_range(len(operands)):
        if is_bound(TOKENS, i):
            given = given + (known, operands[i] - own)
        else:
            given = given + (operands[i],)
    if full is not None:
        given = given + (gl.where(full, 1, 0),)
    WITH_FULL: gl.constexpr = full is not None
    return gl.inline_asm_elementwise(
        assembly(TOKENS, WITH_FULL), registers(TOKENS, WITH_FULL), given + (scores,),
        dtype=gl.float32, is_pure=True, pack=1,
    )


@triton.constexpr_function
def taken(tokens):
    """Return the kind of each operand: a comparison's type, "bool" or "bound"."""
    found = []
    for token in tokens.split("; "):
        left, _, right = token.partition(" ")
        if left == "kv_idx":
            found.append("bound")
        elif right:
            found += [right, right]
        elif left == "bool":
            found.append("bool")
    return found


@triton.constexpr_function
def is_bound(tokens, i):
    """Return whether operand i is a "bound"."""
    return taken(tokens)[i] == "bound"


@triton.constexpr_function
def registers(tokens, with_full):
    """Return the constraints of `assembly`."""
    letters = ""
    for kind in taken(tokens):
        letters += {
            "bound": "rr", "bool": "r", "s32": "r", "s64": "l", "f32": "f", "f64": "d",
        }[kind]
    return ",".join(["=f", *letters, *("r" if with_full else ""), "f"])


@triton.constexpr_function
def assembly(tokens, with_full):
    """Return PTX that sets $0 to the last operand, or to -inf."""
    lines, stack, place, names = [], [], 1, 0
    for token in tokens.split("; "):
        left, _, right = token.partition(" ")
        if right or left == "bool":
            name = f"p{names}"
            names += 1
            if left == "bool":
                lines.append(f"setp.ne.s32 {name}, ${place}, 0;")
                place += 1
            else:
                sign, kind = (right, "s32") if left == "kv_idx" else (left, right)
                # NaN differs from every number, itself included.
                sign = "neu" if sign == "ne" and kind[0] == "f" else sign
                lines.append(f"setp.{sign}.{kind} {name}, ${place}, ${place + 1};")
                place += 2
            stack.append(name)
        elif left == "not":
            lines.append(f"not.pred {stack[-1]}, {stack[-1]};")
        else:
            second = stack.pop()
            lines.append(f"{left}.pred {stack[-1]}, {stack[-1]}, {second};")
    (last,) = stack
    if with_full:
        lines += [f"setp.ne.s32 full, ${place}, 0;", f"or.pred {last}, {last}, full;"]
        place += 1
    lines.append(f"selp.f32 $0, ${place}, 0fFF800000, {last};")
    declared = ", ".join([f"p{i}" for i in range(names)] + ["full"] * with_full)
    return f"{{ .reg .pred {declared}; {' '.join(lines)} }}"
