"""Prose check: the comments and docstrings that it finds, and those that it leaves."""

from __future__ import annotations

import pytest

from scripts.prose import comments_in_c, hanging, private_word, texts_in_python


@pytest.mark.parametrize(
    "text",
    [
        "Of calls, that are remembered with their plans.",
        "By hand: the processor takes denormals for 0.",
        "What a tile brings.",
        "Whose storage is smaller than its shape.",
        "Up to so many query rows are decoded.",
        "As many columns as turns take.",
        "That nothing fails.",
        "Who is measured: backends and peers.",
    ],
)
def test_a_clause_of_the_line_above_is_found(text: str) -> None:
    assert hanging(text)


@pytest.mark.parametrize(
    "text",
    [
        "Maximum number of call shapes that keep a plan.",
        "By default the registry chooses.",
        "Of course a row may be dead.",
        "What does a dead row give? Zeros.",
        "of a row",  # behind the member that it describes
        "Softmax of a row.",
    ],
)
def test_a_statement_or_a_question_is_left(text: str) -> None:
    assert not hanging(text)


def test_private_words_are_found() -> None:
    assert private_word("Rows that are spoilt are left out.") == "spoilt"
    assert private_word("the first so many keys") == "so many"
    assert private_word("so many that they fill a tile; non-finite rows") is None


def test_python_has_comments_blocks_and_docstrings() -> None:
    source = (
        '"""Module."""\n'
        "# First line,\n"
        "# second line.\n"
        "SIZE = 3  # trailing\n"
        '"""Bytes\nof a page."""\n'
        "# alone\n"
        'text = "# no comment"\n'
    )
    assert sorted(texts_in_python(source)) == [
        (1, "Module."),
        (2, "First line,\nsecond line."),
        (4, "trailing"),
        (5, "Bytes\nof a page."),
        (7, "alone"),
    ]


def test_c_has_blocks_and_trailing_comments() -> None:
    source = (
        "// First line,\n// second line.\nint a;  // Of one\nint b;  // Of another\n"
        '/* A block\n   of two. */\nconst char* c = "// no comment";\n'
    )
    assert list(comments_in_c(source)) == [
        (1, "First line,\nsecond line."),
        (3, "Of one"),
        (4, "Of another"),
        (5, "A block\n   of two."),
    ]
