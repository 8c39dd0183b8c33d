"""Innermost loops of a disassembled kernel, and the registers that it spills there.

`nvdisasm -c` prints instructions and labels. Loops are found as in compilers, by dominators in the
graph of basic blocks, because ptxas moves rarely executed code, and the ends of waits, behind the
kernel's end, and jumps back from there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["Loop", "product_loops", "spill_instructions"]

_LABEL = re.compile(r"^\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_SPILLS = ("STL", "LDL")


@dataclass(frozen=True)
class Loop:
    """Instructions of a loop, how many of them are products, and how many store or load registers
    that were spilled."""

    instructions: int
    products: int
    spills: int


@dataclass
class _Instruction:
    guarded: bool
    operation: str
    operands: str


def _parsed(disassembly: str) -> tuple[list[_Instruction], dict[str, int]]:
    """Instructions, and the one that each label stands before."""
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in disassembly.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(instructions)
        found = _INSTRUCTION.search(line)
        if found:
            instructions.append(_Instruction(found[1] is not None, found[2], found[3]))
    return instructions, labels


def _successors(instructions: list[_Instruction], labels: dict[str, int]) -> list[set[int]]:
    """Return the instructions that may follow each."""
    found = []
    for i, one in enumerate(instructions):
        kind = one.operation.partition(".")[0]
        after = {i + 1}
        target = _TARGET.search(one.operands)
        # A call of a label within the kernel is a jump to far away.
        if kind in ("BRA", "JMP", "CALL") and target and target[1] in labels:
            # An instruction with operands before its target depends on them.
            after = {i + 1} if one.guarded or "," in one.operands else set()
            after.add(labels[target[1]])
        elif kind in ("EXIT", "RET") and not one.guarded:
            after = set()
        found.append({j for j in after if j < len(instructions)})
    return found


def _blocks(successors: list[set[int]]) -> tuple[list[range], list[set[int]]]:
    """Basic blocks, and which may follow each."""
    starts = {0}
    for i, after in enumerate(successors):
        if after != {i + 1}:
            starts |= after | {i + 1}
    ordered = sorted(start for start in starts if start < len(successors))
    blocks = [
        range(begin, end)
        for begin, end in zip(ordered, [*ordered[1:], len(successors)], strict=True)
    ]
    number = {block.start: n for n, block in enumerate(blocks)}
    return blocks, [{number[j] for j in successors[block[-1]]} for block in blocks]


def _loops(after: list[set[int]]) -> list[set[int]]:
    """Return the blocks of each loop: those of jumps back to a block that dominates the jump."""
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(after[0]))]
    while stack:
        block, rest = stack[-1]
        following = next((n for n in rest if n not in seen), None)
        if following is None:
            order.append(stack.pop()[0])
        else:
            seen.add(following)
            stack.append((following, iter(after[following])))
    order.reverse()
    before: dict[int, set[int]] = {n: set() for n in order}
    for n in order:
        for following in after[n]:
            before[following].add(n)
    dominators = {n: set(order) for n in order}
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for n in order[1:]:
            new = {n}.union(set.intersection(*(dominators[m] for m in before[n])))
            changed |= new != dominators[n]
            dominators[n] = new
    loops: dict[int, set[int]] = {}
    for n in order:
        for head in after[n] & dominators[n]:
            body, waiting = loops.setdefault(head, {head}), [n]
            while waiting:
                block = waiting.pop()
                if block not in body:
                    body.add(block)
                    waiting += before[block]
    return list(loops.values())


def product_loops(disassembly: str, products: tuple[str, ...]) -> list[Loop]:
    """The loops with `products`, beginnings of instructions' names, in which no other such loop
    lies, in the code's order."""
    instructions, labels = _parsed(disassembly)
    blocks, after = _blocks(_successors(instructions, labels))

    def count(body: set[int], names: tuple[str, ...]) -> int:
        return sum(instructions[i].operation.startswith(names) for n in body for i in blocks[n])

    with_products = [body for body in _loops(after) if count(body, products)]
    innermost = [
        body for body in with_products if not any(other < body for other in with_products)
    ]
    return [
        Loop(sum(len(blocks[n]) for n in body), count(body, products), count(body, _SPILLS))
        for body in sorted(innermost, key=min)
    ]


def spill_instructions(disassembly: str) -> int:
    """Return the number of a kernel's spill instructions."""
    return sum(one.operation.startswith(_SPILLS) for one in _parsed(disassembly)[0])
