"""Rules for the source of kernels for Intel GPUs: they exclude what Intel's compiler lacks,
compiles badly, or understands differently.

A *kernel* is a function under ``@triton.jit``. Code under ``if DESCRIBED == "host"`` is skipped:
it is compiled for targets that get descriptors as arguments, which Intel GPUs don't.

Intel's compiler turns a load by a descriptor into a 2D block load only if the same function
creates the descriptor. It checks that after inlining, so a kernel may pass its descriptor to
another, which loads by it under ``if DESCRIBED is not None``. `anyflex-triton`'s
tests/test_compiled_kernels.py shows the same in compiled kernels.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Violation", "violations"]

BANNED_NAMES = {
    "make_block_ptr": "block pointers are gone since Triton 3.9: use a tensor descriptor",
    "advance": "block pointers are gone since Triton 3.9: use a tensor descriptor",
    "inline_asm_elementwise": "inline assembly is one vendor's",
    "async_task": "warp specialisation is NVIDIA's",
    "TensorDescriptor": "a descriptor is made on the device, by the kernel that uses it",
}
BANNED_KEYWORDS = {
    "warp_specialize": "warp specialisation is NVIDIA's",
    "num_ctas": "clusters are NVIDIA's",
    "maxnreg": "Intel's compiler has grf_mode instead",
    "noinline": "a descriptor's loads are in the function that makes it, once that is inlined",
}
VENDORS = ("cuda", "hip", "intel")
"""Vendors' modules below ``triton.language.extra``. ``triton.language.extra.libdevice`` is for all
vendors."""
DESCRIBED = "DESCRIBED"
"""Name of the constant that says where descriptors are created; for an Intel GPU ``"kernel"`` or
None."""
HANDED = rf"(\w+\.)?{DESCRIBED} (is not None|== 'host')"
"""Conditions, of a constant or of a record's field, under which a parameter is a descriptor."""
LEAVES = "a descriptor is used in the function that makes it, or handed to a kernel"
BANNED_MODULES = ("triton.tools.tensor_descriptor", "triton.experimental")
ACCESSES = ("load", "store", "gather", "scatter", "atomic_add", "atomic_max", "atomic_min")


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule and its place."""

    line: int
    rule: str


def violations(source: str) -> list[Violation]:
    """Return the violations in a module's source, in the order of its lines."""
    tree = _OfThisTarget().visit(ast.parse(source))
    found = [*_everywhere(tree)]
    kernels = set(_kernels(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and _is_kernel(node):
            found += [*_in_kernel(node, kernels)]
    return sorted(found, key=lambda each: (each.line, each.rule))


class _OfThisTarget(ast.NodeTransformer):
    """Removes code for other targets."""

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        if _is_of_others(node.test):
            return node.orelse or [ast.copy_location(ast.Pass(), node)]
        return node

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        self.generic_visit(node)
        return node.orelse if _is_of_others(node.test) else node


def _is_of_others(test: ast.expr) -> bool:
    return ast.unparse(test) == f"{DESCRIBED} == 'host'"


def _everywhere(tree: ast.Module) -> Iterator[Violation]:
    docstrings = set(_docstrings(tree))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for module in _imported(node):
                if reason := _module_problem(module):
                    yield Violation(node.lineno, reason)
        elif isinstance(node, ast.Attribute):
            if node.attr in BANNED_NAMES and not _of_a_mapping(node):
                yield Violation(node.lineno, BANNED_NAMES[node.attr])
            if node.attr in VENDORS and _last(node.value) == "extra":
                yield Violation(node.lineno, f"triton.language.extra.{node.attr} is one vendor's")
        elif isinstance(node, ast.Name) and node.id in BANNED_NAMES:
            yield Violation(node.lineno, BANNED_NAMES[node.id])
        elif isinstance(node, ast.Constant) and id(node) not in docstrings:
            # The string is source text that the package generates.
            yield from _in_text(str(node.value), node.lineno)


def _in_text(text: str, line: int) -> Iterator[Violation]:
    words = {*(name for name in BANNED_NAMES if name != "advance"), "warp_specialize"}
    for word in sorted(words):
        if word in text:
            yield Violation(line, BANNED_NAMES.get(word) or BANNED_KEYWORDS[word])
    for vendor in VENDORS:
        if f"extra.{vendor}" in text:
            yield Violation(line, f"triton.language.extra.{vendor} is one vendor's")


def _in_kernel(kernel: ast.FunctionDef, kernels: set[str]) -> Iterator[Violation]:
    made = {
        target.id
        for node in ast.walk(kernel)
        if isinstance(node, ast.Assign) and _makes_descriptor(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    parameters = {argument.arg for argument in kernel.args.args}
    handed = {id(node) for node in _where_described(kernel)}
    allowed = set()
    for node in ast.walk(kernel):
        if not isinstance(node, ast.Call):
            continue
        name = _last(node.func)
        for keyword in node.keywords:
            if keyword.arg in BANNED_KEYWORDS:
                yield Violation(node.lineno, BANNED_KEYWORDS[keyword.arg])
        if name == "dot" and not any(each.arg == "input_precision" for each in node.keywords):
            yield Violation(node.lineno, "a dot names its input_precision: float32's is tf32 else")
        if isinstance(node.func, ast.Name) and name in kernels:
            allowed |= {id(argument) for argument in node.args}
            allowed |= {id(keyword.value) for keyword in node.keywords}
        if name in ACCESSES and isinstance(node.func, ast.Attribute):
            receiver = node.func.value
            if isinstance(receiver, ast.Name) and receiver.id in made:
                allowed.add(id(receiver))
            elif _last(receiver) not in ("tl", "gl") and not (
                _first(receiver) in parameters and id(node) in handed
            ):
                yield Violation(node.lineno, LEAVES)
    for node in ast.walk(kernel):
        read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in made
        if read and id(node) not in allowed:
            yield Violation(node.lineno, LEAVES)
        if _makes_descriptor(node) and not _assigned(kernel, node):
            yield Violation(node.lineno, "a descriptor gets a name, and is used in its function")


def _where_described(kernel: ast.FunctionDef) -> Iterator[ast.AST]:
    for node in ast.walk(kernel):
        if isinstance(node, ast.If) and re.fullmatch(HANDED, ast.unparse(node.test)):
            for statement in node.body:
                yield from ast.walk(statement)


def _kernels(tree: ast.Module) -> Iterator[str]:
    """Yield the names of the module's kernels and records, and of its imports from other modules
    of the package."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and _is_kernel(node, "jit", "record"):
            yield node.name
        elif isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("anyflex_triton."):
            yield from (alias.asname or alias.name for alias in node.names)


def _makes_descriptor(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _last(node.func) == "make_tensor_descriptor"


def _assigned(kernel: ast.FunctionDef, call: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Assign)
        and node.value is call
        and all(isinstance(target, ast.Name) for target in node.targets)
        for node in ast.walk(kernel)
    )


def _is_kernel(function: ast.FunctionDef | ast.ClassDef, *names: str) -> bool:
    """Return whether a function has a decorator of one of these names, by default "jit"."""
    decorators = [
        each.func if isinstance(each, ast.Call) else each for each in function.decorator_list
    ]
    return any(_last(each) in (names or ("jit",)) for each in decorators)


def _first(node: ast.AST) -> str:
    """Return the name of the record that an attribute is a field of, or the name itself."""
    return _first(node.value) if isinstance(node, ast.Attribute) else _last(node)


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names]


def _module_problem(module: str) -> str | None:
    for vendor in VENDORS:
        if f"{module}.".startswith(f"triton.language.extra.{vendor}."):
            return f"triton.language.extra.{vendor} is one vendor's"
    for banned in BANNED_MODULES:
        if f"{module}.".startswith(f"{banned}."):
            return f"{banned} is not for every device"
    return None


def _of_a_mapping(node: ast.Attribute) -> bool:
    """Return whether an attribute is a method of something else than `tl`: only `tl.advance` is
    meant."""
    return node.attr == "advance" and _last(node.value) not in ("tl", "language")


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _docstrings(tree: ast.Module) -> Iterator[int]:
    """Yield the ids of strings that are statements: they are documentation."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield id(node.value)
