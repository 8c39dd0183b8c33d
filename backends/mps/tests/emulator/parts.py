"""Sources in parts that are compiled one by one, each once for all sources that have it.

Kernels of many calls differ in the functions of their mods alone, and kernels of one call have
these in common. So functions that a thread runs by itself, without threadgroup memory and without
its simdgroup, are one part, and the kernels with all other functions another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .metal_source import (
    Instance,
    Kernel,
    after_source,
    blank,
    blank_comments,
    closing_bracket,
    rewritten,
)

__all__ = ["FUNCTIONS", "KERNELS", "Part", "parts_of"]

KERNELS, FUNCTIONS = "kernel.metal", "functions.metal"
"""Names of the parts' files, in messages and line tables."""

_FUNCTION = re.compile(r"^static inline [^;{}()=]*?\b(\w+)\(", re.MULTILINE)
_COOPERATES = re.compile(r"\b(threadgroup|simd|quad)")
_DIRECTIVE = re.compile(r"^[ \t]*#[^\n]*", re.MULTILINE)

_ADDRESS_SPACES = """
#undef device
#undef constant
#undef threadgroup
#undef kernel
#undef EMULATED_THREADGROUP_SECTION
#undef EMULATED_VARIABLE_SECTION
#define device EMULATED_DEVICE
#define constant EMULATED_CONSTANT
#define threadgroup EMULATED_THREADGROUP
#define kernel static
#define EMULATED_THREADGROUP_SECTION
#define EMULATED_VARIABLE_SECTION
"""


@dataclass(frozen=True)
class Part:
    """A part of a source as C++.

    Attributes:
        file: name of the file, KERNELS or FUNCTIONS.
        first_line: number of the source line, from 1, that the part's line 1 is.
        before: what stands before line 1: includes and declarations.
        body: lines of the source.
        after: entry points, which only a part with kernels has.
    """

    file: str
    first_line: int
    before: str
    body: str
    after: str

    @property
    def cpp(self) -> str:
        """The part's C++."""
        return f"{self._source}{self.after}"

    @property
    def cpp_checked(self) -> str:
        """The same for the race build, which has no address spaces: a copy, of which nothing is
        compiled, is held to them."""
        return f"{self.cpp}\n{_ADDRESS_SPACES}namespace address_spaces {{\n{self._source}}}\n"

    def with_source_lines(self, message: str) -> str:
        """Return clang's message with the source's lines for the part's."""
        return re.sub(
            rf"\b{self.file}:(\d+)",
            lambda found: f"{KERNELS}:{int(found[1]) + self.first_line - 1}",
            message,
        )

    @property
    def _source(self) -> str:
        return f'{self.before}\n#line 1 "{self.file}"\n{self.body}\n'


@dataclass(frozen=True)
class _Function:
    """A function of a source: where it begins, where its body opens and where it ends."""

    name: str
    begin: int
    opens: int
    end: int

    @property
    def span(self) -> tuple[int, int]:
        return self.begin, self.end + 1


def parts_of(
    source: str,
    kernels: Mapping[str, Kernel],
    instances: Mapping[str, Instance] | None = None,
    *,
    whole: bool = False,
) -> tuple[Part, ...]:
    """Return the parts of a source.

    One with templates, or with anything else than kernels and functions that are `static inline`,
    is one part.

    Args:
        source: the Metal source.
        kernels: its kernels.
        instances: kernels that are instances of templates, by name.
        whole: leave it one part.
    """
    after = after_source(kernels, instances or {})
    text = blank_comments(source)
    functions = _functions(text)
    others = _cooperating(text, functions)
    alone = [function for function in functions if function not in others]
    if whole or instances or not alone or not _is_plain(text, functions, kernels):
        return (Part(KERNELS, 1, "", rewritten(source, kernels), after),)
    together = [(kernel.begin, kernel.end + 1) for kernel in kernels.values()]
    together += [function.span for function in others]
    called = _calls(text, together)
    declared = [f"{_declaration(source, f)};" for f in alone if f.name in called]
    before = "\n".join([*_DIRECTIVE.findall(text), "using namespace metal;", *declared])
    first_line = 1 + source.count("\n", 0, min(begin for begin, _ in together))
    own = rewritten(_without(source, [function.span for function in alone]), kernels)
    body = "\n".join(line.rstrip() for line in own.split("\n")[first_line - 1 :])
    shared = _without(source, together)
    # A function that no other one calls is shared whatever these kernels call: fewer parts differ.
    inner = _calls(text, [(function.opens, function.end) for function in alone])
    for function in alone:
        if function.name in called or function.name not in inner:
            shared = shared.replace(
                source[function.begin : function.opens], _declaration(source, function)
            )
    shared = "\n".join(line.rstrip() for line in rewritten(shared, {}).split("\n"))
    return (
        Part(KERNELS, first_line, before, body, after),
        Part(FUNCTIONS, 1, "", shared.rstrip(), ""),
    )


def _functions(text: str) -> list[_Function]:
    functions = []
    for match in _FUNCTION.finditer(text):
        opens = text.find("{", closing_bracket(text, match.end() - 1))
        if opens < 0:
            break
        functions.append(_Function(match[1], match.start(), opens, closing_bracket(text, opens)))
    return functions


def _calls(text: str, spans: Sequence[tuple[int, int]]) -> set[str]:
    """Return the names of what some spans call."""
    return {name for begin, end in spans for name in re.findall(r"\b(\w+)\(", text[begin:end])}


def _cooperating(text: str, functions: Sequence[_Function]) -> list[_Function]:
    """Return the functions that, themselves or in what they call, do what a threadgroup or a
    simdgroup does together."""
    found: list[_Function] = []
    names: set[str] = set()
    # A function is defined before it is called.
    for function in functions:
        if _COOPERATES.search(text[slice(*function.span)]) or names & _calls(
            text, [(function.opens, function.end)]
        ):
            found.append(function)
            names.add(function.name)
    return found


def _is_plain(text: str, functions: Sequence[_Function], kernels: Mapping[str, Kernel]) -> bool:
    """Whether a source is directives, then functions of different names and kernels."""
    spans = [function.span for function in functions]
    spans += [(kernel.begin, kernel.end + 1) for kernel in kernels.values()]
    rest = _without(text, spans)
    first = min(begin for begin, _ in spans)
    if _DIRECTIVE.search(text, first) or any(kernel.is_template for kernel in kernels.values()):
        return False
    rest = _DIRECTIVE.sub("", rest).replace("using namespace metal;", "")
    return not rest.strip() and len({function.name for function in functions}) == len(functions)


def _without(source: str, spans: Sequence[tuple[int, int]]) -> str:
    """Return the source with blanks for some spans: all else keeps its place."""
    for begin, end in spans:
        source = source[:begin] + blank(source[begin:end]) + source[end:]
    return source


def _declaration(source: str, function: _Function) -> str:
    text = source[function.begin : function.opens].removeprefix("static inline ")
    return f'__attribute__((visibility("hidden"))) {text}'
