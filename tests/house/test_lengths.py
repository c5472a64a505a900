"""No function of the product is longer than 60 lines, no file longer than 400; nothing is exempt."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.house.imports import nodes, together

pytestmark = together

FUNCTION_LINES = 60
FILE_LINES = 400
FILES = sorted(path for room in ("coordinator", "facility") for path in (ROOT / room).rglob("*.py"))


def functions(file: Path) -> Iterator[tuple[str, int]]:
    """Name and lines of every function of a file, decorators left out."""
    for node in nodes(file.read_text()):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_function_is_longer_than_a_screen():
    found = [
        f"{file.relative_to(ROOT)}: {name} has {lines} lines"
        for file in FILES
        for name, lines in functions(file)
        if lines > FUNCTION_LINES
    ]
    assert not found, found


def test_no_file_holds_more_than_one_idea_has_room_for():
    lines = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in FILES}
    assert not {name: count for name, count in lines.items() if count > FILE_LINES}


@pytest.mark.parametrize(("body", "lines"), [(59, 60), (60, 61)])
def test_lines_are_counted_from_def_to_the_last_statement(tmp_path: Path, body: int, lines: int):
    file = tmp_path / "long.py"
    file.write_text("@decorated\ndef long():\n" + "    pass\n" * body + "\n\nafter = 1\n")
    assert list(functions(file)) == [("long", lines)]
