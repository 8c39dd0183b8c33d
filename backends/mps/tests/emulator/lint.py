"""Rules of source that Apple's compiler holds and the emulator's doesn't, and rules of our own.

Our kernels are plain C without templates: the fewer constructs, the smaller the risk that a
compiler which nobody here can run refuses them. `findings` names each breach by rule and line;
`conversions` names implicit conversions, which clang sees.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from .compiling import type_warnings
from .metal_source import Kernel, as_cpp, blank_comments, closing_bracket, kernels_of, split_list

__all__ = ["RULES", "Finding", "conversions", "findings"]

MOST_BUFFERS = 31

PRAGMAS = ("#pragma METAL fp math_mode(safe)", "#pragma METAL fp contract(off)")
"""Both decide over torch's compile options: without them products and sums may contract."""

FORBIDDEN_WORDS = {
    "double": "Metal has no double",
    "std": "Metal has no std::",
    "goto": "Metal has no goto",
    "register": "Metal has no register",
    "thread_local": "Metal has no thread_local",
    "virtual": "Metal has no virtual functions",
    "dynamic_cast": "Metal has no dynamic_cast",
    "typeid": "Metal has no typeid",
    "new": "Metal has no new",
    "delete": "Metal has no delete",
    "try": "Metal has no exceptions",
    "catch": "Metal has no exceptions",
    "throw": "Metal has no exceptions",
    "noexcept": "Metal has no noexcept",
    "asm": "Metal has no asm",
    "template": "kernels are made for their types: no templates",
    "auto": "types are written out",
    "size_t": "sizes are uint or ulong",
    "long long": "Metal has no long long",
    "long double": "Metal has no long double",
}

RESERVED = frozenset(
    """
    device constant thread threadgroup threadgroup_imageblock ray_data object_data kernel vertex
    fragment visible intersection object mesh sampler texture texture2d access array half bfloat
    float int uint short ushort char uchar long ulong bool half2 half3 half4 float2 float3 float4
    int2 int3 int4 uint2 uint3 uint4 short2 ushort2 long2 ulong2 matrix vec metal fast precise
    simdgroup_matrix quad patch stage_in imageblock coherent payload and or not xor bitand bitor
    compl and_eq or_eq xor_eq not_eq signed unsigned class namespace operator private public
    protected this union using typename typedef true false explicit export friend inline mutable
    sizeof static struct switch volatile while
    """.split()
)
"""Words that name nothing of ours."""

FUNCTIONS = frozenset(
    """
    threadgroup_barrier simdgroup_barrier simd_sum simd_max simd_min simd_broadcast
    simd_broadcast_first simd_shuffle simd_shuffle_xor simd_shuffle_down simd_shuffle_up simd_any
    simd_all simdgroup_load simdgroup_store simdgroup_multiply simdgroup_multiply_accumulate
    make_filled_simdgroup_matrix thread_elements exp exp2 log log2 log10 sqrt rsqrt sin cos tan
    sinh cosh tanh asin acos atan asinh acosh atanh atan2 pow floor ceil trunc rint round fabs fmod
    fma abs max min fmax fmin clamp select copysign isnan isinf isfinite signbit as_type popcount
    clz ctz mulhi dot any all atomic_load_explicit atomic_store_explicit atomic_exchange_explicit
    atomic_fetch_add_explicit atomic_fetch_sub_explicit atomic_fetch_max_explicit
    atomic_fetch_min_explicit atomic_fetch_and_explicit atomic_fetch_or_explicit
    atomic_fetch_xor_explicit atomic_compare_exchange_weak_explicit dextents matmul2d_descriptor
    get_destination_cooperative_tensor get_capacity is_valid_element get_multidimensional_index run
    """.split()
)
"""Metal's functions that occur in torch's or MLX's kernels: those may be called."""

TYPES = frozenset(
    """
    bool char uchar short ushort int uint long ulong half bfloat float ulong2 uint2 uint3 float2
    float4 half2 half4 bfloat2 bfloat4 int2 int4 uint4 atomic_float atomic_uint atomic_int
    simdgroup_matrix simdgroup_float8x8 simdgroup_half8x8 simdgroup_bfloat8x8 void
    """.split()
)
_CONTROL = frozenset("if for while switch return sizeof decltype do else case".split())
_SPACES = frozenset("device constant thread threadgroup".split())
_TYPE = "|".join(sorted(TYPES, key=len, reverse=True))
_NAMED_TYPE = rf"\b(?:{_TYPE})\b(?:\s*<[^<>;(){{}}]*>)?"
_DECLARED_POINTER = re.compile(rf"{_NAMED_TYPE}(?:\s+const)?\s*([*&])+\s*\w+")
_DECLARATION = re.compile(rf"{_NAMED_TYPE}[\s*&]+(\w+)\s*(?=[=;,\[)(])")
_UNNAMED = re.compile(
    r"\bauto(?=\s+\w+\s*=\s*\w+\s*\.\s*"
    r"(?:get_destination_cooperative_tensor|get_multidimensional_index)\b)"
)
"""Before results of which Apple documents no type."""
_FUNCTION = re.compile(r"\b(\w+)\s*\(")
_INTEGER = re.compile(r"(?<![\w.])(0[xX][0-9a-fA-F]+|\d+)([uUlL]*)(?![\w.])")
_FLOAT = re.compile(
    r"(?<![\w.])(?:\d+\.\d*(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)(\w*)"
)


@dataclass(frozen=True)
class Finding:
    """A breach of a rule.

    Attributes:
        rule: name of the rule, of RULES, or "conversion".
        line: number of the source line, from 1.
        text: what is wrong.
    """

    rule: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.rule}: {self.text}"


@dataclass(frozen=True)
class _Function:
    """A function that the source defines: its parameters' and its body's places."""

    name: str
    parameters: tuple[int, int]
    body: tuple[int, int]


class _Source:
    """A source as the rules read it: `text` has blanks for comments."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.text = blank_comments(source)

    @cached_property
    def code(self) -> str:
        """The text without preprocessor lines."""
        return re.sub(r"^[ \t]*#[^\n]*", lambda m: " " * len(m[0]), self.text, flags=re.MULTILINE)

    @cached_property
    def kernels(self) -> dict[str, Kernel]:
        return kernels_of(self.source)

    @cached_property
    def functions(self) -> list[_Function]:
        found, place = [], 0
        while match := _FUNCTION.search(self.code, place):
            opened = match.end() - 1
            closed = closing_bracket(self.code, opened)
            after = re.compile(r"\s*(?:\[\[.*?\]\]\s*)?\{").match(self.code, closed + 1)
            place = closed + 1
            if after is None or match[1] in _CONTROL:
                continue
            end = closing_bracket(self.code, after.end() - 1)
            found.append(_Function(match[1], (opened + 1, closed), (after.end(), end)))
            place = end
        return found

    def bodies(self) -> Iterator[tuple[_Function, str]]:
        for function in self.functions:
            yield function, self.code[slice(*function.body)]


Found = Iterator[tuple[int, str]]
"""Places in the text, and what is wrong there."""


def _ascii(source: _Source) -> Found:
    """torch hands the source on as ASCII."""
    for found in re.finditer(r"[^\x00-\x7f]", source.source):
        yield found.start(), f"{found[0]!r} isn't ASCII"


def _pragma(source: _Source) -> Found:
    """Safe mathematics and no contraction, before the first function."""
    first = source.functions[0].parameters[0] if source.functions else len(source.text)
    for pragma in PRAGMAS:
        if not 0 <= source.text.find(pragma) < first:
            yield 0, f"no {pragma!r} before the first function"


def _forbidden_word(source: _Source) -> Found:
    """Words of C++ that Metal hasn't, or that our kernels do without."""
    code = _UNNAMED.sub("    ", source.code)
    for word, reason in FORBIDDEN_WORDS.items():
        pattern = r"\b" + word.replace(" ", r"\s+") + r"\b"
        for found in re.finditer(pattern, code):
            yield found.start(), reason


def _lambda(source: _Source) -> Found:
    """Lambdas came with Metal 3.2."""
    for found in re.finditer(r"(?<![\w\])\[])\s*\[[^\[\]]*\]\s*\([^()]*\)\s*\{", source.code):
        yield found.start(), "no lambdas"


def _local_static(source: _Source) -> Found:
    """Metal has no static variables in functions."""
    for function, body in source.bodies():
        for found in re.finditer(r"\bstatic\b", body):
            yield function.body[0] + found.start(), "no static variables in functions"


def _reserved_name(source: _Source) -> Found:
    """Variables, parameters and functions have no names that Metal or C++ reserves."""
    for found in _DECLARATION.finditer(source.code):
        if found[1] in RESERVED or found[1].startswith("__"):
            yield found.start(1), f"{found[1]!r} is reserved"


def _unqualified_pointer(source: _Source) -> Found:
    """Every pointer and reference names its address space."""
    for found in _DECLARED_POINTER.finditer(source.code):
        before = re.split(r"[;{}(,]", source.code[: found.start()])[-1]
        # An operator's operand, as in `x * y`, follows something else than a declaration's begin.
        if before.strip() and not set(before.split()) <= {*_SPACES, "const", "volatile", "static"}:
            continue
        if not set(before.split()) & _SPACES:
            yield found.start(), f"{found[0].strip()!r} has no address space"


def _float_literal(source: _Source) -> Found:
    """Literals of floats end in f or h: without, they would be double elsewhere."""
    for found in _FLOAT.finditer(source.code):
        if found[1] not in ("f", "h", "F", "H"):
            yield found.start(), f"{found[0]!r} lacks its f"


def _integer_literal(source: _Source) -> Found:
    """Literals that int doesn't hold say their type."""
    for found in _INTEGER.finditer(source.code):
        if int(found[1], 0) >= 1 << 31 and not found[2]:
            yield found.start(), f"{found[0]!r} lacks its u or l"


def _buffers(source: _Source) -> Found:
    """At most 31 buffers, with indices 0, 1, 2, ..., each written out."""
    for kernel in source.kernels.values():
        indices = [buffer.index for buffer in kernel.buffers]
        if len(indices) > MOST_BUFFERS:
            yield kernel.begin, f"{kernel.name} has {len(indices)} buffers, of {MOST_BUFFERS}"
        if indices != list(range(len(indices))):
            yield kernel.begin, f"{kernel.name} has buffers {indices}: not 0, 1, 2, ..."
        for parameter in _parameters(source, kernel.name):
            if "[[" not in parameter:
                yield kernel.begin, f"{kernel.name}: {parameter!r} has no [[attribute]]"


def _parameters(source: _Source, name: str) -> list[str]:
    function = next(f for f in source.functions if f.name == name)
    return split_list(source.code[slice(*function.parameters)])


def _threadgroup_array(source: _Source) -> Found:
    """Threadgroup variables stand at the kernel's top, with literal sizes."""
    declared = re.compile(r"\bthreadgroup\s+[\w:<>, ]+?\s(\w+)\s*((?:\[[^\]]*\]\s*)*);")
    for function, body in source.bodies():
        for found in declared.finditer(body):
            place = function.body[0] + found.start()
            if function.name not in source.kernels:
                yield place, f"{found[1]!r} isn't in a kernel"
            elif body[: found.start()].count("{") or re.search(
                r"[;{}]\s*$", re.sub(declared, "", body[: found.start()]).strip()
            ):
                yield place, f"{found[1]!r} isn't declared before the kernel's other statements"
            for size in re.findall(r"\[([^\]]*)\]", found[2]):
                if not re.fullmatch(r"\s*\d+\s*", size):
                    yield place, f"the size {size!r} of {found[1]!r} isn't a literal"


def _recursion(source: _Source) -> Found:
    """Metal has no recursion."""
    calls = {
        function.name: {found[1] for found in _FUNCTION.finditer(body)}
        for function, body in source.bodies()
    }
    for function in source.functions:
        reached: set[str] = set()
        new = {function.name}
        while new := {called for name in new for called in calls.get(name, ())} - reached:
            reached |= new
        if function.name in reached:
            yield function.body[0], f"{function.name} calls itself"


def _mixed_operands(source: _Source) -> Found:
    """min, max, clamp and select are ambiguous where their operands differ in type."""
    for found in re.finditer(r"(?<![\w])(min|max|clamp|select)\s*\(", source.code):
        opened = found.end() - 1
        operands = split_list(source.code[opened + 1 : closing_bracket(source.code, opened)])
        compared = operands[:2] if found[1] == "select" else operands
        kinds = {kind for kind in map(_kind, compared) if kind}
        if len(kinds) > 1:
            yield found.start(), f"{found[1]} of {' and '.join(sorted(kinds))}"


def _kind(operand: str) -> str | None:
    """Return the type that a literal or a cast gives an operand, if one does."""
    operand = operand.strip()
    cast = re.match(rf"\(?\s*({_TYPE})\s*\)?\s*[(\w]", operand)
    if cast and re.match(rf"(\(\s*{cast[1]}\s*\)|{cast[1]}\s*\()", operand):
        return cast[1]
    number = re.fullmatch(r"-?\s*(0[xX][0-9a-fA-F]+[uUlL]*|[\d.]+(?:[eE][+-]?\d+)?\w*)", operand)
    if number is None:
        return None
    literal = number[1]
    if not literal.lower().startswith("0x") and re.search(r"[.fFhH]|[eE]", literal):
        return "half" if literal[-1] in "hH" else "float"
    suffix = re.sub(r"[^uUlL]", "", literal).lower()
    return {"": "int", "u": "uint", "l": "long"}.get(suffix, "ulong")


def _barrier_in_branch(source: _Source) -> Found:
    """Every thread reaches every barrier: none stands in an if, else, switch or ?:."""
    for function, body in source.bodies():
        branches = list(_branches(body))
        for found in re.finditer(r"\bthreadgroup_barrier\b", body):
            if any(begin <= found.start() < end for begin, end in branches):
                yield function.body[0] + found.start(), "a barrier in a branch"


def _branches(body: str) -> Iterator[tuple[int, int]]:
    """Yield the places of all that runs under a condition."""
    for found in re.finditer(r"\b(if|switch)\s*\(|\belse\b|\?", body):
        start = found.end()
        if found[1]:
            start = closing_bracket(body, found.end() - 1) + 1
        yield start, _statement_end(body, start)


def _statement_end(body: str, start: int) -> int:
    """Return where the statement that begins at `start` ends."""
    place = start + len(body[start:]) - len(body[start:].lstrip())
    head = re.compile(r"(for|while|if|switch)\s*\(").match(body, place)
    if head:
        return _statement_end(body, closing_bracket(body, head.end() - 1) + 1)
    if body[place : place + 1] == "{":
        return closing_bracket(body, place) + 1
    end = body.find(";", place)
    return len(body) if end < 0 else end + 1


def _early_return(source: _Source) -> Found:
    """No thread returns while others have a barrier before them."""
    for function, body in source.bodies():
        last = body.rfind("threadgroup_barrier")
        for found in re.finditer(r"\breturn\b", body[: max(last, 0)]):
            yield function.body[0] + found.start(), "a return before a barrier"


def _unknown_function(source: _Source) -> Found:
    """Calls are of functions that the source defines, or that torch's and MLX's kernels call."""
    defined = {function.name for function in source.functions}
    for function, body in source.bodies():
        # Template arguments stand between a name and its parenthesis.
        for found in re.finditer(r"\b(\w+)\s*(?:<[\w\s,]*>)?\s*\(", body):
            if found[1] not in defined | FUNCTIONS | TYPES | _CONTROL | _declared(body):
                yield function.body[0] + found.start(), f"{found[1]} isn't known"


def _declared(body: str) -> set[str]:
    """Return names that are declared with arguments: of matrices with a diagonal,
    `simdgroup_matrix<...> m(x)`, and of tensors, `tensor<..., tensor_inline> t(x, ...)`."""
    types = r"\b(?:simdgroup_matrix\s*<[^<>]*>|tensor_inline\s*>)"
    return set(re.findall(rf"{types}\s+(\w+)\s*\(", body))


_CHECKS: tuple[Callable[[_Source], Found], ...] = (
    _ascii,
    _pragma,
    _forbidden_word,
    _lambda,
    _local_static,
    _reserved_name,
    _unqualified_pointer,
    _float_literal,
    _integer_literal,
    _buffers,
    _threadgroup_array,
    _recursion,
    _mixed_operands,
    _barrier_in_branch,
    _early_return,
    _unknown_function,
)


def _name(check: Callable[[_Source], Found]) -> str:
    return check.__name__.strip("_").replace("_", "-")


RULES = tuple(map(_name, _CHECKS))
"""Names of the rules of `findings`."""


def findings(source: str) -> list[Finding]:
    """Return the breaches of a source, by line."""
    read = _Source(source)
    found = [
        Finding(_name(check), source.count("\n", 0, place) + 1, text)
        for check in _CHECKS
        for place, text in check(read)
    ]
    return sorted(found, key=lambda finding: (finding.line, finding.rule))


def conversions(source: str) -> list[Finding]:
    """Return implicit conversions that lose something, which overloads of Metal may take amiss."""
    cpp = as_cpp(source, kernels_of(source))
    return [Finding("conversion", line, text) for line, text in type_warnings(cpp)]
