"""A value of thousands of characters does not fill the screen: its error still says what was expected."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from coordinator import cli
from facility.exchange.errors import bounded
from tests.conftest import ROOT
from tests.federations import write_federation

LONG = "x" * 5000
VALUES = {
    "a name of a registry": {"aggregation": {"rule": LONG}},
    "an unknown key": {LONG: 1},
    "words": {"training": {"schedule": "b c " * 2000}},
    "a list": {"training": {"device": ["a b"] * 1000}},
    "a mapping": {"training": {"schedule": {"a": "b'c " * 2000}}},
    "a number": {"training": {"steps": int("9" * 3000)}},
    "a facility": {"facilities": [{"name": LONG, "dataset": "d"}]},
    "a path": {"model": "m/" * 3000},
}


@pytest.mark.parametrize("change", VALUES.values(), ids=VALUES)
def test_an_error_quotes_a_long_value_in_part(
    change: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = write_federation(tmp_path, ["a"], **change)
    monkeypatch.setattr("sys.argv", ["crossfed", "render", "-f", str(file)])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: ") and len(said) < 1200 + len(str(file)), len(said)
    assert yaml.safe_load(file.read_text())


def test_a_word_of_a_command_line_is_quoted_in_part():
    words = [sys.executable, "-m", "coordinator.cli", LONG]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ran.returncode == 2 and "characters" in ran.stderr and len(ran.stderr) < 1500, ran.stderr


def test_prose_is_left_whole():
    """An apostrophe opens no quotation."""
    text = (
        "the site's policy, and " + "a word " * 200 + "of the facilities' own: found 'y', expected 'z' in " + "/a" * 500
    )
    assert bounded(text) == text
    assert bounded(f"k is '{LONG}', expected 'a'").endswith("x', expected 'a'")
