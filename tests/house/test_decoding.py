"""What another program prints may be in any encoding, and ends no command of ours."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.conftest import ROOT

STARTS = ("run", "Popen", "check_output")


def strict_calls(file: Path) -> list[int]:
    """Lines that start a program and read its output as text, of which one byte in another encoding is an exception."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    started = [one for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr in STARTS]
    options = {one.lineno: {word.arg for word in one.keywords} for one in started}
    return [line for line, given in options.items() if given & {"text", "encoding"} and "errors" not in given]


def test_programs_are_read_whatever_their_encoding():
    files = [file for room in ("coordinator", "facility") for file in (ROOT / room).rglob("*.py")]
    assert {str(file.relative_to(ROOT)): lines for file in files if (lines := strict_calls(file))} == {}
