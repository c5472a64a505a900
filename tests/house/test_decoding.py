"""What another program prints may be in any encoding, and ends no command of ours; files are in UTF-8 everywhere."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

from tests.conftest import ROOT
from tests.house.imports import nodes, together

pytestmark = together

STARTS = ("run", "Popen", "check_output")


def calls(file: Path, names: Collection[str]) -> list[ast.Call]:
    """Calls in a file of functions and methods of these names."""
    text = file.read_text(encoding="utf-8")
    if not any(f"{name}(" in text for name in names):
        return []
    found = [node for node in nodes(text) if isinstance(node, ast.Call)]
    return [one for one in found if getattr(one.func, "attr", getattr(one.func, "id", "")) in names]


def strict_calls(file: Path) -> list[int]:
    """Lines that start a program and read its output as text, of which one byte in another encoding is an exception."""
    started = [one for one in calls(file, STARTS) if isinstance(one.func, ast.Attribute)]
    options = {one.lineno: {word.arg for word in one.keywords} for one in started}
    return [line for line, given in options.items() if given & {"text", "encoding"} and "errors" not in given]


def test_programs_are_read_whatever_their_encoding():
    files = [file for room in ("coordinator", "facility") for file in (ROOT / room).rglob("*.py")]
    assert {str(file.relative_to(ROOT)): lines for file in files if (lines := strict_calls(file))} == {}


ROOMS = ("coordinator", "facility", "docs", "examples")
OPENS = ("read_text", "write_text", "open", "fdopen", "NamedTemporaryFile", "TemporaryFile", "FileHandler")


def calls_in_the_locale(file: Path) -> Iterator[int]:
    """Lines that read or write text and name no encoding: then it is the locale's, another one at each facility."""
    for one in calls(file, OPENS):
        method = isinstance(one.func, ast.Attribute)
        name = getattr(one.func, "attr", getattr(one.func, "id", ""))
        given = [*one.args, *(word.value for word in one.keywords if word.arg == "mode")]
        modes = [value.value for value in given if isinstance(value, ast.Constant) and isinstance(value.value, str)]
        if any(word.arg == "encoding" for word in one.keywords):
            continue
        if name.endswith("_text"):
            wrong = method and len(one.args) == (name == "write_text")
        else:  # a file opened without a mode is one of text
            wrong = any(set(mode) <= set("rwaxt+") for mode in modes) or (
                name == "open" and not method and len(given) == 1 and not modes
            )
        if wrong:
            yield one.lineno


def test_text_is_read_and_written_in_utf_8_whatever_the_locale():
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py")]
    assert {str(file.relative_to(ROOT)): lines for file in files if (lines := [*calls_in_the_locale(file)])} == {}


def test_a_file_with_letters_of_any_language_is_read_in_a_locale_without_them(tmp_path: Path):
    (tmp_path / "a.json").write_bytes('{"name": "Zürich, Évora, Łódź"}'.encode())
    code = "import sys; from facility.exchange.json_values import read_values; print(ascii(read_values(sys.argv[1])))"
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a.json")],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert "Z\\xfcrich" in done.stdout, done.stderr
