"""LLVM IR as text: values, blocks, functions, a module's declarations, and emitters of
instructions. Text, because parsing it takes less time than llvmlite's own builder does."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["FLOATS", "LANES", "PIECE", "WIDTHS", "Block", "Emitter", "Function", "Module", "Value"]

LANES = 16
"""Elements of a vector: as many as one word of live bits has."""

PIECE = 500
"""Maximum number of instructions of a block; some masks and scores that read a table or two have
200 in their longest."""

_NEVER = "never"
_FROM = re.compile(r"%([\w.]+)\]")

WIDTHS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "float": 32, "double": 64}
FLOATS = ("float", "double")
_SUFFIXES = {"float": "f32", "double": "f64", "ptr": "p0"}


class Value(NamedTuple):
    """An operand: its text, the type of a lane, and whether it has one lane or `LANES`."""

    text: str
    type: str
    vector: bool

    @property
    def full_type(self) -> str:
        return f"<{LANES} x {self.type}>" if self.vector else self.type

    def __str__(self) -> str:
        """The operand with its type, as a call takes it."""
        return f"{self.full_type} {self.text}"


class Module:
    """Collects functions and their declarations.

    Args:
        features: the target's, without the plus sign: ``"fma"``, ``"avx512f"``.
        attributes: text of a function's attributes.
    """

    def __init__(self, features: frozenset[str], attributes: str) -> None:
        self.features = features
        self.attributes = attributes
        self.globals: dict[str, str] = {}
        self.declarations: dict[str, str] = {}
        self.functions: dict[str, str] = {}

    def declare(self, name: str, result: str, arguments: Sequence[str]) -> None:
        self.declarations[name] = f"declare {result} @{name}({', '.join(arguments)})"

    def __str__(self) -> str:
        parts = (self.globals, self.declarations, self.functions)
        return "\n".join([*(text for part in parts for text in part.values()), ""])


class Block:
    """A label and its instructions; its first and its last ones may be added late."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.phis: list[str] = []
        self.lines: list[str] = []
        self.end: str | None = None


class Function:
    """A function under construction. Blocks are printed in the order of `blocks`.

    Args:
        module: the module that `finish` adds it to.
        header: for example ``"define void @f(ptr %x)"``.
    """

    def __init__(self, module: Module, name: str, header: str) -> None:
        self.module = module
        self.name = name
        self.header = header
        self.blocks: list[Block] = []
        self._values = 0

    def block(self, label: str) -> Block:
        block = Block(f"{label}.{len(self.blocks)}")
        self.blocks.append(block)
        return block

    def fresh(self) -> str:
        self._values += 1
        return f"%v{self._values}"

    def finish(self) -> None:
        lines = [f"{self.header} {self.module.attributes} {{"]
        # A value defined in a block that was cut comes from the block's last piece.
        last = {
            block.label: _piece(block.label, pieces - 1)
            for block in self.blocks
            if (pieces := _pieces(block)) > 1 and "ptr %tile" in self.header
        }
        for block in self.blocks:
            lines.append(f"{block.label}:")
            for phi in block.phis:
                lines.append(_FROM.sub(lambda found: f"%{last.get(found[1], found[1])}]", phi))
            lines += self._cut(block) if block.label in last else block.lines
            if block.end is not None:
                lines.append(block.end)
        if last:
            lines += [f"{_NEVER}:", "ret void"]
        lines.append("}")
        self.module.functions[self.name] = "\n".join(lines)

    def _cut(self, block: Block) -> list[str]:
        """A long block's instructions in pieces. LLVM's scheduling time grows faster than the
        square of a block's length, and it joins blocks that one unconditional branch divides. So
        each piece ends in a branch that is never taken, on a condition that LLVM can't know."""
        # Only allocas of the function's first piece have a fixed place on the stack.
        lines = sorted(block.lines, key=lambda line: " = alloca " not in line)
        cut = lines[:PIECE]
        for number in range(1, _pieces(block)):
            label, never = _piece(block.label, number), self.fresh()
            cut.append(f"{never} = icmp eq ptr %tile, null")
            cut.append(f"br i1 {never}, label %{_NEVER}, label %{label}")
            cut.append(f"{label}:")
            cut += lines[number * PIECE : (number + 1) * PIECE]
        return cut


def _pieces(block: Block) -> int:
    return max(1, -(-len(block.lines) // PIECE))


def _piece(label: str, number: int) -> str:
    return f"{label}.{number}"


def _float_text(value: float) -> str:
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


class Emitter:
    """Appends instructions to a block of a function.

    Args:
        vector: operands and results have `LANES` lanes.
    """

    def __init__(self, function: Function, block: Block, vector: bool) -> None:
        self.function = function
        self.module = function.module
        self.block = block
        self.vector = vector

    @property
    def fused(self) -> bool:
        """Whether multiply-add is one instruction. (AArch64 always has it.)"""
        return "fma" in self.module.features or "neon" in self.module.features

    def full(self, type_: str) -> str:
        return f"<{LANES} x {type_}>" if self.vector else type_

    def line(self, text: str) -> None:
        self.block.lines.append(text)

    def put(self, text: str, type_: str) -> Value:
        """Append an instruction with a result."""
        name = self.function.fresh()
        self.block.lines.append(f"{name} = {text}")
        return Value(name, type_, self.vector)

    def constant(self, type_: str, value: float) -> Value:
        """A constant: rounded to float, or wrapped to an integer type."""
        if type_ == "float":
            text = _float_text(_rounded(value))
        elif type_ == "double":
            text = _float_text(value)
        elif type_ == "i1":
            text = "true" if value else "false"
        else:
            half = 1 << (WIDTHS[type_] - 1)
            text = str((int(value) + half) % (2 * half) - half)
        return Value(f"splat ({type_} {text})" if self.vector else text, type_, self.vector)

    def op(self, name: str, x: Value, y: Value) -> Value:
        """Apply an instruction to two operands of one type, which the result has too: ``"fadd"``,
        ``"shl"``."""
        return self.put(f"{name} {x.full_type} {x.text}, {y.text}", x.type)

    def add(self, x: Value, y: Value) -> Value:
        return self.op("fadd" if x.type in FLOATS else "add", x, y)

    def sub(self, x: Value, y: Value) -> Value:
        return self.op("fsub" if x.type in FLOATS else "sub", x, y)

    def mul(self, x: Value, y: Value) -> Value:
        return self.op("fmul" if x.type in FLOATS else "mul", x, y)

    def div(self, x: Value, y: Value) -> Value:
        return self.op("fdiv", x, y)

    def fma(self, x: Value, y: Value, z: Value) -> Value:
        """x * y + z, rounded once where the processor can."""
        return self.intrinsic("fma" if self.fused else "fmuladd", x, y, z)

    def polynomial(self, x: Value, coefficients: Sequence[float]) -> Value:
        """Evaluate a polynomial by Horner's scheme; coefficients from the constant term up."""
        total = self.constant(x.type, coefficients[-1])
        for coefficient in coefficients[-2::-1]:
            total = self.fma(total, x, self.constant(x.type, coefficient))
        return total

    def compare(self, predicate: str, x: Value, y: Value) -> Value:
        """The result is of type i1. Predicates: ``"olt"``, ``"uno"``; ``"slt"``, ``"eq"``."""
        name = "fcmp" if x.type in FLOATS else "icmp"
        return self.put(f"{name} {predicate} {x.full_type} {x.text}, {y.text}", "i1")

    def select(self, condition: Value, x: Value, y: Value) -> Value:
        return self.put(f"select {condition}, {x}, {y}", x.type)

    def negate(self, x: Value) -> Value:
        if x.type in FLOATS:
            return self.put(f"fneg {x}", x.type)
        return self.sub(self.constant(x.type, 0), x)

    def invert(self, x: Value) -> Value:
        return self.op("xor", x, self.constant(x.type, -1 if x.type != "i1" else 1))

    def convert(self, name: str, x: Value, type_: str) -> Value:
        """Convert lane by lane: ``"sext"``, ``"bitcast"``, ``"fpext"`` and their like."""
        return self.put(f"{name} {x} to {self.full(type_)}", type_)

    def resize(self, x: Value, type_: str, *, signed: bool = True) -> Value:
        """An integer of another width: truncated, or extended."""
        if WIDTHS[x.type] == WIDTHS[type_]:
            return x
        if WIDTHS[x.type] > WIDTHS[type_]:
            return self.convert("trunc", x, type_)
        return self.convert("sext" if signed else "zext", x, type_)

    def to_integer(self, x: Value, type_: str) -> Value:
        """Truncate to an integer. A value out of range gives an arbitrary one, where LLVM's own is
        poison."""
        return self.put(f"freeze {self.convert('fptosi', x, type_)}", type_)

    def intrinsic(self, name: str, *operands: Value, extra: str = "") -> Value:
        """Call an intrinsic whose operands and result have one type."""
        x = operands[0]
        suffix = _SUFFIXES.get(x.type, x.type)
        full = f"llvm.{name}.v{LANES}{suffix}" if self.vector else f"llvm.{name}.{suffix}"
        types = [x.full_type] * len(operands) + ([extra.split()[0]] if extra else [])
        self.module.declare(full, x.full_type, types)
        arguments = ", ".join([*map(str, operands), *([extra] if extra else [])])
        return self.put(f"call {x.full_type} @{full}({arguments})", x.type)

    def spread(self, x: Value) -> Value:
        """Broadcast one lane's value to all `LANES` of a vector; for an emitter of one lane."""
        wide = f"<{LANES} x {x.type}>"
        first, spread = self.function.fresh(), self.function.fresh()
        self.line(f"{first} = insertelement {wide} poison, {x}, i32 0")
        zeros = f"<{LANES} x i32> zeroinitializer"
        self.line(f"{spread} = shufflevector {wide} {first}, {wide} poison, {zeros}")
        return Value(spread, x.type, True)

    def reversed(self, x: Value) -> Value:
        order = ", ".join(f"i32 {lane}" for lane in range(LANES - 1, -1, -1))
        return self.put(
            f"shufflevector {x}, {x.full_type} poison, <{LANES} x i32> <{order}>", x.type
        )

    def call(self, name: str, type_: str, *operands: Value) -> Value:
        """Call a function of the module, or an external one that was declared."""
        arguments = ", ".join(map(str, operands))
        return self.put(f"call {self.full(type_)} @{name}({arguments})", type_)

    def load(self, pointer: str, type_: str, align: int) -> Value:
        return self.put(f"load {self.full(type_)}, ptr {pointer}, align {align}", type_)

    def store(self, x: Value, pointer: str, align: int) -> None:
        self.line(f"store {x}, ptr {pointer}, align {align}")

    def address(self, base: str, type_: str, offset: Value) -> str:
        """Text of base + offset elements; for one lane."""
        name = self.function.fresh()
        self.line(f"{name} = getelementptr {type_}, ptr {base}, {offset}")
        return name

    def word(self, x: Value) -> Value:
        """`LANES` bools as the bits of an i16 of one lane."""
        name = self.function.fresh()
        self.line(f"{name} = bitcast {x} to i{LANES}")
        return Value(name, f"i{LANES}", False)

    def from_word(self, word: Value) -> Value:
        return self.put(f"bitcast {word} to {self.full('i1')}", "i1")


def _rounded(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
