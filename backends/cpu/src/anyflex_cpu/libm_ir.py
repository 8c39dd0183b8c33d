"""Functions of the C mathematics library in compiled mods: called lane by lane in a loop over 16,
or vector arithmetic with such a loop as fallback."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from anyflex_cpu.elementary_ir import LARGEST_ANGLE, cosine, sine
from anyflex_cpu.llvm_text import LANES, WIDTHS, Block, Emitter, Function, Module, Value

__all__ = ["angle_function", "float_remainder", "library_function"]

_FAST_NAMES = {"sin": sine, "cos": cosine}


def library_function(e: Emitter, name: str, *operands: Value) -> Value:
    """Call libm's function of that name (the name of the double version) on floats or doubles, or
    the native library's on other types."""
    type_ = operands[0].type
    full = name + ("f" if type_ == "float" else "")
    e.module.declare(full, type_, [type_] * len(operands))
    if not e.vector:
        return e.call(full, type_, *operands)
    lanes = f"af.{full}"
    if lanes not in e.module.functions:
        function, block, arguments = _begun(e.module, lanes, type_, len(operands))
        result = _looped(function, block, full, type_, arguments)
        function.blocks[-1].lines.append(f"ret {result}")
        function.finish()
    return e.call(lanes, type_, *operands)


def angle_function(e: Emitter, name: str, x: Value) -> Value:
    """sin or cos of 16 floats of any size."""

    def holds(e: Emitter, x: Value) -> Value:
        limit = e.constant("float", LARGEST_ANGLE)
        return e.compare("olt", e.intrinsic("fabs", x), limit)

    return _guarded(e, name, holds, _FAST_NAMES[name], x)


def float_remainder(e: Emitter, x: Value, y: Value) -> Value:
    """C's fmod of 16 floats, exact. Quotients below 2^22 need no loop: with q within 1 of x / y,
    x - q y is a float."""
    if not e.fused:
        return library_function(e, "fmod", x, y)

    def quotient(e: Emitter, x: Value, y: Value) -> Value:
        size = e.div(e.intrinsic("fabs", x), e.intrinsic("fabs", y))
        return e.intrinsic("trunc", size)

    def holds(e: Emitter, x: Value, y: Value) -> Value:
        small = e.compare("olt", quotient(e, x, y), e.constant("float", 2.0**22))
        finite = e.compare("olt", e.intrinsic("fabs", y), e.constant("float", float("inf")))
        return e.op("and", small, finite)

    def remainder(e: Emitter, x: Value, y: Value) -> Value:
        divisor = e.intrinsic("fabs", y)
        r = e.fma(e.negate(quotient(e, x, y)), divisor, e.intrinsic("fabs", x))
        below = e.compare("olt", r, e.constant("float", 0.0))
        r = e.select(below, e.add(r, divisor), r)
        r = e.select(e.compare("oge", r, divisor), e.sub(r, divisor), r)
        return e.intrinsic("copysign", r, x)

    return _guarded(e, "fmod", holds, remainder, x, y)


def _guarded(
    e: Emitter,
    name: str,
    holds: Callable[..., Value],
    fast: Callable[..., Value],
    *operands: Value,
) -> Value:
    """Evaluate `fast` where `holds` is true of all lanes, else call the function lane by lane."""
    lanes = f"af.guarded.{name}"
    module = e.module
    if lanes not in module.functions:
        full = f"{name}f"
        module.declare(full, "float", ["float"] * len(operands))
        function, block, arguments = _begun(module, lanes, "float", len(operands))
        start = Emitter(function, block, vector=True)
        word = start.word(holds(start, *arguments))
        quick, slow = function.block("fast"), function.block("slow")
        whole = start.function.fresh()
        start.line(f"{whole} = icmp eq i{LANES} {word.text}, -1")
        start.line(f"br i1 {whole}, label %{quick.label}, label %{slow.label}")
        inside = Emitter(function, quick, vector=True)
        inside.line(f"ret {fast(inside, *arguments)}")
        result = _looped(function, slow, full, "float", arguments)
        function.blocks[-1].lines.append(f"ret {result}")
        function.finish()
    return e.call(lanes, "float", *operands)


def _begun(
    module: Module, name: str, type_: str, count: int
) -> tuple[Function, Block, list[Value]]:
    arguments = [Value(f"%x{i}", type_, True) for i in range(count)]
    types = ", ".join(map(str, arguments))
    header = f"define internal <{LANES} x {type_}> @{name}({types}) noinline"
    function = Function(module, name, header)
    return function, function.block("entry"), arguments


def _looped(
    function: Function, block: Block, name: str, type_: str, arguments: Sequence[Value]
) -> Value:
    """Append to `block` a loop that calls `name` for each lane; the result is in a new block."""
    size = WIDTHS[type_] // 8
    array = f"[{LANES} x {type_}]"
    lines = block.lines
    places = []
    for i, argument in enumerate(arguments):
        lines.append(f"%lanes{i} = alloca {array}, align 64")
        lines.append(f"store {argument}, ptr %lanes{i}, align 64")
        places.append(f"%lanes{i}")
    loop = function.block("lane")
    done = function.block("done")
    lines.append(f"br label %{loop.label}")
    loop.lines.append(f"%lane = phi i64 [0, %{block.label}], [%next, %{loop.label}]")
    one = Emitter(function, loop, vector=False)
    index = Value("%lane", "i64", False)
    addresses = [one.address(place, type_, index) for place in places]
    result = one.call(name, type_, *(one.load(a, type_, size) for a in addresses))
    # The result overwrites the first operand, which has been read.
    one.store(result, addresses[0], size)
    one.line("%next = add i64 %lane, 1")
    one.line(f"%more = icmp ult i64 %next, {LANES}")
    one.line(f"br i1 %more, label %{loop.label}, label %{done.label}")
    return Emitter(function, done, vector=True).load(places[0], type_, 64)
