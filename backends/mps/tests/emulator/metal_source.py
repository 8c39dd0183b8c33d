"""Metal source read as text: kernels with their parameters, and the C++ that is compiled of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = [
    "CONSTANT",
    "READ_ONLY",
    "WRITABLE",
    "Buffer",
    "Instance",
    "Kernel",
    "after_source",
    "as_cpp",
    "blank",
    "blank_comments",
    "closing_bracket",
    "granule_shift",
    "kernels_of",
    "rewritten",
    "split_list",
]

WRITABLE, READ_ONLY, CONSTANT = 0, 1, 2
"""Kinds of buffers, as in the runtime's `launch.h`."""

ATTRIBUTES = {
    "thread_position_in_grid": ("position_in_grid", 3),
    "thread_position_in_threadgroup": ("position_in_threadgroup", 3),
    "threadgroup_position_in_grid": ("group_position", 3),
    "threadgroups_per_grid": ("groups", 3),
    "threads_per_threadgroup": ("threads_per_group", 3),
    "threads_per_grid": ("threads_per_grid", 3),
    "thread_index_in_threadgroup": ("thread_index", 1),
    "thread_index_in_simdgroup": ("lane", 1),
    "simdgroup_index_in_threadgroup": ("simdgroup", 1),
    "simdgroups_per_threadgroup": ("simdgroups", 1),
}
"""Field of `emulated_lane` and number of dimensions of each attribute of a parameter."""
CONSTANTS = {"threads_per_simdgroup": "32u", "thread_execution_width": "32u"}

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(r"(?:\bkernel|\[\[\s*kernel\b[^\]]*\]\])\s+void\s+(\w+)\s*\(")
_ATTRIBUTE = re.compile(r"\[\[\s*(\w+)(?:\(\s*(\d+)\s*\))?\s*\]\]")
# It begins with a set of characters, which the search looks for fast.
_LITERAL = re.compile(
    r"([0-9.](?<![\w.][0-9.])"
    r"(?:(?<=\.)\d+(?:[eE][+-]?\d+)?|(?<=\d)\d*(?:\.\d*(?:[eE][+-]?\d+)?|[eE][+-]?\d+)))"
    r"(bf|h|H)?(?![\w.])"
)
_VARIABLE = re.compile(
    r"^([ \t]*)threadgroup\s+((?:[\w:]+(?:<[^;=()]*>)?))\s+(\w+\s*(?:\[[^;=]*?\])*"
    r"(?:\s*,\s*\w+\s*(?:\[[^;=]*?\])*)*)\s*;",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Buffer:
    """A parameter of a kernel that is bound to memory.

    Attributes:
        index: number of the binding, `[[buffer(index)]]`.
        name: name in the source.
        kind: WRITABLE, READ_ONLY or CONSTANT.
        is_reference: whether it is one object, `constant T&`.
    """

    index: int
    name: str
    kind: int
    is_reference: bool


@dataclass(frozen=True)
class Kernel:
    """A kernel that a source defines.

    Attributes:
        name: its name.
        buffers: its parameters that are bound to memory.
        arguments: C++ expressions for all its parameters, in order.
        is_template: whether only an `Instance` of it can be called.
        begin: where it begins in the source.
        end: where it ends.
    """

    name: str
    buffers: tuple[Buffer, ...]
    arguments: tuple[str, ...]
    is_template: bool
    begin: int
    end: int


@dataclass(frozen=True)
class Instance:
    """A kernel that is a template, with its arguments, for sources of others.

    Attributes:
        kernel: name of the template.
        arguments: template arguments, as in the source.
    """

    kernel: str
    arguments: str


def blank(text: str) -> str:
    """Return a text as blanks, with its lines."""
    return "\n".join(" " * len(line) for line in text.split("\n"))


def blank_comments(source: str) -> str:
    """Return the source with comments as blanks: every other character keeps its place."""
    return _COMMENT.sub(lambda found: blank(found[0]), source)


def split_list(text: str) -> list[str]:
    """Split at commas outside of all brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "<([{") - (character in ">)]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def closing_bracket(text: str, at: int) -> int:
    """Return the place of the bracket that closes the one at `at`."""
    opening = text[at]
    closing = {"(": ")", "{": "}"}[opening]
    depth = 0
    for found in re.compile(f"[{opening}{closing}]").finditer(text, at):
        depth += 1 if found[0] == opening else -1
        if depth == 0:
            return found.start()
    raise SyntaxError(
        f"no {closing!r} closes the {opening!r} of line {text.count(chr(10), 0, at) + 1}"
    )


def _parameter(text: str, next_index: int) -> Buffer | str:
    """Return the buffer that a parameter is, or the expression of its attribute."""
    attributes = dict(_ATTRIBUTE.findall(text))
    plain = re.sub(r"\[\[.*?\]\]", "", text).strip()
    declared = re.fullmatch(r"(.*?)(\w+)", plain, re.DOTALL)
    if declared is None:
        raise SyntaxError(f"no name in the parameter {text!r}")
    type_, name = declared[1].strip(), declared[2]
    for attribute in attributes:
        if attribute in CONSTANTS:
            return CONSTANTS[attribute]
        if attribute in ATTRIBUTES:
            member, dimensions = ATTRIBUTES[attribute]
            expression = f"emulated_current->{member}"
            if dimensions == 3:
                expression += {"2": ".xy", "3": ""}.get(type_[-1], ".x")
            return f"({type_.removeprefix('const ')})({expression})"
    if attributes and "buffer" not in attributes:
        raise SyntaxError(f"the emulator doesn't know the attribute of {text!r}")
    words = re.findall(r"\w+", type_)
    pointed_at = type_.rpartition("*")[0] if "*" in type_ else type_
    if "constant" in words:
        kind = CONSTANT
    elif "device" in words:
        kind = READ_ONLY if re.search(r"\bconst\b", pointed_at) else WRITABLE
    else:
        raise SyntaxError(f"the parameter {text!r} is neither device, constant nor an attribute")
    index = int(attributes["buffer"]) if attributes else next_index
    return Buffer(index, name, kind, type_.endswith("&"))


def kernels_of(source: str) -> dict[str, Kernel]:
    """Return the kernels of a source by name."""
    text = blank_comments(source)
    found = {}
    for match in _KERNEL.finditer(text):
        name = match[1]
        close = closing_bracket(text, match.end() - 1)
        body = text.index("{", close)
        buffers: list[Buffer] = []
        arguments = []
        for parameter in split_list(text[match.end() : close]):
            read = _parameter(parameter, buffers[-1].index + 1 if buffers else 0)
            if isinstance(read, Buffer):
                kind = "reference" if read.is_reference else "pointer"
                arguments.append(f"emulated::{kind}{{buffers[{read.index}]}}")
                buffers.append(read)
            else:
                arguments.append(read)
        end = closing_bracket(text, body)
        before = re.sub(r"^[ \t]*#.*$", "", text[: match.start()], flags=re.MULTILINE)
        is_template = before.rstrip().endswith(">")
        found[name] = Kernel(
            name, tuple(buffers), tuple(arguments), is_template, match.start(), end
        )
    return found


def granule_shift(source: str) -> int:
    """Return the exponent of the smallest size of an element that is stored in memory.

    The race build tracks accesses per granule: neighbours in one granule would race falsely.
    """
    text = blank_comments(source)
    if re.search(r"\b(u?char\d?|u?int8_t|threadgroup\s+bool)\b|\bbool\s*\*", text):
        return 0
    return 1 if re.search(r"\b(half|bfloat|u?short|u?int16_t)\d?\b", text) else 2


def _float_literal(found: re.Match[str]) -> str:
    """Return a literal as C++: MSL has no double, so one without a suffix is float."""
    number, suffix = found[1], found[2]
    if suffix is None:
        return f"{number}f"
    return f"{'bfloat' if suffix == 'bf' else 'half'}({number}f)"


def _kernel_at(kernels: Mapping[str, Kernel], place: int) -> str:
    inside = [k.name for k in kernels.values() if k.begin <= place <= k.end]
    return inside[0] if inside else ""


def _threadgroup_variables(found: re.Match[str], kernel: str) -> str:
    """Return threadgroup variables as registered statics of one section, with gaps between."""
    indent, type_, declarators = found.groups()
    lines = []
    for declarator in split_list(declarators):
        name = re.match(r"\w+", declarator)[0]  # type: ignore[index]
        lines.append(
            f"static threadgroup {type_} {declarator} EMULATED_THREADGROUP_SECTION = {{}}; "
            f"static threadgroup char {name}_redzone[64] EMULATED_THREADGROUP_SECTION; "
            f"static const emulated_variable {name}_variable EMULATED_VARIABLE_SECTION = "
            f'{{"{kernel}", "{name}", (void*)&{name}, sizeof({name})}};'
        )
    return indent + " ".join(lines)


def _entries(kernels: Mapping[str, Kernel], instances: Mapping[str, Instance]) -> Iterator[str]:
    for name, kernel in kernels.items():
        if not kernel.is_template:
            yield _entry(name, name, kernel)
    for name, instance in instances.items():
        function = f"{instance.kernel}<{instance.arguments}>"
        yield _entry(name, function, kernels[instance.kernel])


def _entry(name: str, function: str, kernel: Kernel) -> str:
    # A pointer to an instance has the types that its parameters' defaults stand for.
    return (
        f'extern "C" void emulated_entry_{name}(void* EMULATED_OWN* buffers) {{ (void)buffers; '
        f"auto* emulated = &{function}; emulated({', '.join(kernel.arguments)}); }}"
    )


_SECTIONS = """
#undef device
#undef constant
#undef threadgroup
EMULATED_THREADGROUP_SECTION static char emulated_padding[64];
EMULATED_VARIABLE_SECTION static const emulated_variable emulated_padding_variable = {
    "", "", emulated_padding, 0};
extern "C" {
__attribute__((visibility("hidden"))) extern char __start_emulated_tg[], __stop_emulated_tg[];
__attribute__((visibility("hidden"))) extern char __start_emulated_tgv[], __stop_emulated_tgv[];
EMULATED_UNCHECKED void emulated_sections(void** bounds) {
    bounds[0] = __start_emulated_tg;
    bounds[1] = __stop_emulated_tg;
    bounds[2] = __start_emulated_tgv;
    bounds[3] = __stop_emulated_tgv;
}
}
"""


def rewritten(source: str, kernels: Mapping[str, Kernel]) -> str:
    """Return the source's own lines as C++, in their places."""
    text = _VARIABLE.sub(
        lambda found: _threadgroup_variables(found, _kernel_at(kernels, found.start())), source
    )
    return _LITERAL.sub(_float_literal, text)


def after_source(kernels: Mapping[str, Kernel], instances: Mapping[str, Instance]) -> str:
    """Return the C++ that follows a source: an entry point for each kernel and instance."""
    entries = "\n".join(_entries(kernels, instances))
    return f'#line 1 "entries"\nusing namespace metal;\n{entries}\n{_SECTIONS}'


def as_cpp(
    source: str, kernels: Mapping[str, Kernel], instances: Mapping[str, Instance] | None = None
) -> str:
    """Return the C++ of a source, with an entry point for each kernel and template instance."""
    return f"{rewritten(source, kernels)}\n{after_source(kernels, instances or {})}"
