"""Prose check: comments and docstrings that hang on the line above them, private words, and long
commit subjects.

    python scripts/prose.py [--commits-after REVISION]

A comment, or a docstring, is a complete statement: it can be read without the line above it. One
that begins with "Of", "By", "What", "Whose" and the like is a genitive or a relative clause of
something else, unless it is a question. A private word has a word of the field's in its place. A
commit's subject has at most 72 characters.

Exits 1 where something is found, and names it as ``file:line: text``.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

__all__ = ["comments_in_c", "commit_subjects", "hanging", "private_word", "texts_in_python"]

ROOT = Path(__file__).resolve().parent.parent
WRITTEN_TO_THE_RULE_AFTER = "ff0a9f53234a51411e00f88f7b30ecda21fb3445"
"""Last commit before subjects were held to 72 characters."""
LONGEST_SUBJECT = 72

_HANGING = re.compile(
    r"(Of(?! course)|By(?! default)|What|Whose|Who|Whoever|That|Nor|Else|"
    r"((Up to|At most) )?(As|So) (many|much))\b",
    re.IGNORECASE,
)
_PRIVATE = re.compile(r"\b(spoilt|to be had|so many(?! that\b))\b")
_SOURCES = (".py", ".c", ".cpp", ".cu", ".h")


def hanging(text: str) -> bool:
    """Whether a comment's or docstring's first sentence hangs on something above it."""
    text = text.strip()
    first = re.split(r"(?<=[.?!:])\s", text, maxsplit=1)[0]
    begins = text[:1].isupper() and _HANGING.match(text)
    return bool(begins) and not first.rstrip().endswith("?")


def private_word(text: str) -> str | None:
    """Return the first word of a text that nobody outside this project uses so, or None."""
    found = _PRIVATE.search(text)
    return None if found is None else found[0]


def texts_in_python(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each block of comments and each docstring, attributes' included."""
    blocks: dict[int, str] = {}
    last = first = -2
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, text = token.start[0], token.string.lstrip("#:! ")
            alone = not token.line[: token.start[1]].strip()
            if alone and last == line - 1:
                blocks[first] += f"\n{text}"
            else:
                first, blocks[line] = line, text
            last = line if alone else -2
    yield from blocks.items()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def comments_in_c(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each block of comments of a C or C++ source."""
    blocks: dict[int, str] = {}
    last = first = -2
    for match in re.finditer(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", source, re.DOTALL):
        if match[0].startswith('"'):
            continue
        line, text = source.count("\n", 0, match.start()) + 1, match[0].strip("/* \n")
        alone = not source[source.rfind("\n", 0, match.start()) + 1 : match.start()].strip()
        if alone and last == line - 1:
            blocks[first] += f"\n{text}"
        else:
            first, blocks[line] = line, text
        last = line + match[0].count("\n") if alone else -2
    yield from blocks.items()


def commit_subjects(after: str) -> list[str]:
    """Return the subjects of the commits after a revision; HEAD's alone where a clone lacks it."""
    known = subprocess.run(
        ["git", "cat-file", "-e", f"{after}^{{commit}}"], cwd=ROOT, capture_output=True
    )
    wanted = [f"{after}..HEAD"] if known.returncode == 0 else ["-1", "HEAD"]
    printed = subprocess.run(
        ["git", "log", "--no-merges", "--format=%s", *wanted],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return printed.stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--commits-after", default=WRITTEN_TO_THE_RULE_AFTER, metavar="REVISION")
    arguments = parser.parse_args()
    listed = subprocess.run(
        ["git", "ls-files", *(f"*{ending}" for ending in _SOURCES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if not path.exists():
            continue
        source = path.read_text()
        texts = texts_in_python(source) if name.endswith(".py") else comments_in_c(source)
        for line, text in texts:
            beginning = (text.strip().splitlines() or [""])[0]
            if hanging(text):
                found.append(f"{name}:{line}: {beginning}")
            if word := private_word(text):
                found.append(f"{name}:{line}: private word '{word}': {beginning}")
    for subject in commit_subjects(arguments.commits_after):
        if len(subject) > LONGEST_SUBJECT:
            found.append(f"commit subject of {len(subject)} characters: {subject}")
    print("\n".join(found))
    print(f"{len(found)} found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
