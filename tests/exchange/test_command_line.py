"""No option of a command is left out without a word: an empty one, and one that has no effect, are refused."""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from facility.exchange.command_line import parse_arguments, refuse_empty
from facility.exchange.errors import InputError
from tests.conftest import ROOT
from tests.federations import write_federation

TEXT = ["--input", "a.txt", "--tokenizer", "t", "--out", "o", "--block-tokens", "8"]
MEASURE = ["--model", "m", "--out", "p"]
IMAGES = ["--input", "i", "--task", "image-classification", "--model", "m", "--out", "o"]


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["--site", ""], "--site"),
        (["--site="], "--site"),
        (["--fill", "a=b", "--module", "", "--home", "h"], "--module"),
        (["--input", "a", "", "--out", "b"], "--input"),
        ([""], "an argument"),
    ],
)
def test_an_empty_word_is_refused_by_its_option(words: list[str], option: str):
    with pytest.raises(InputError, match=f"^{option} is empty, expected a value"):
        refuse_empty(words)


def test_what_is_not_empty_is_left_alone():
    refuse_empty(["run", "--fill", "a=", "-v", "--log=x", "--", "", "--module", ""])


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        ("facility.prepare", [*TEXT, "--label-field", ""], "--label-field is empty"),
        ("facility.prepare", [*TEXT, "--validation-split", "dev"], "--validation-split has no effect without"),
        ("facility.prepare", [*TEXT, "--most-pixels", "7"], "--most-pixels has no effect on text"),
        ("facility.prepare", [*TEXT, "--task", "chat", "--text-unit", "file"], "--text-unit has no effect on chat"),
        ("facility.prepare", [*IMAGES, "--near-duplicates", "0.8"], "--near-duplicates has no effect on image"),
        ("facility.measure", [*MEASURE, "--site", ""], "--site is empty"),
        ("facility.measure", [*MEASURE, "--tc-interface", "eth1"], "--tc-interface has no effect without --tc-out"),
        ("facility.measure", [*MEASURE, "--timeout", "nan"], "--timeout is nan, expected a number above 0"),
        ("facility.measure", [*MEASURE, "--timeout", "-1"], "--timeout is -1, expected a number above 0"),
        ("facility.measure", [*MEASURE, "--most-megabytes", "inf"], "--most-megabytes is inf, expected a number above"),
        ("facility.measure", [*MEASURE, "--seed", "-1"], "--seed is -1, expected 0 or more"),
        ("coordinator.simulate", ["--federation", "f", "--no-overlap"], "--no-overlap has no effect with --federation"),
        ("coordinator.simulate", ["--problem", "p", "--rounds", "2"], "--rounds has no effect without --federation"),
        ("coordinator.aggregate", ["--base", "", "--out", "o"], "--base is empty"),
    ],
)
def test_module_commands_leave_no_option_out(module: str, words: list[str], said: str):
    with pytest.raises(InputError, match=f"^{said}"):
        importlib.import_module(module).main(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["status", "--follow", "--queues"], "--queues has no effect with --follow"),
        (["render", "--check", "--no-paths"], "--no-paths has no effect with --check"),
        (["login", "a", "--federation", ""], "--federation is empty"),
        (["init", "", "--facility", "a=local"], "an argument is empty"),
        (["explain", "--federation", "f.yml"], "--federation has no effect without a facility"),
        (["explain", "training.steps", "--federation", "f.yml"], "--federation has no effect with the settings key"),
        (["audit", "head", "log", "--head", "0" * 64], "--head, --archive and --facility have no effect on audit head"),
        (["model", ".", "--out", "o", "--revision", "v2"], "--revision has no effect with the folder"),
    ],
)
def test_crossfed_leaves_no_option_out(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_federation(tmp_path, ["a"])
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, InputError) and str(error).startswith(said), error


@pytest.mark.parametrize(("kind", "said"), [(int, "expected a whole number"), (float, "expected a number")])
def test_a_wrong_number_is_refused_in_words_and_not_by_the_name_of_pythons_type(
    kind: type, said: str, capsys: pytest.CaptureFixture[str]
):
    parser = argparse.ArgumentParser()
    parser.add_argument("--many", type=kind)
    with pytest.raises(SystemExit):
        parse_arguments(parser, ["--many", "some"])
    assert f"--many: 'some' given, {said}" in capsys.readouterr().err
    assert parse_arguments(parser, ["--many", "3"]).many == 3


@pytest.mark.parametrize(
    ("side", "words", "said"),
    [
        ("facility", ["--module", ""], "--module is empty"),
        ("facility", ["--as-is", "--torch", "cpu"], "--torch, --torch-index and --wheelhouse have no effect with"),
        ("facility", ["--fill", "a=b"], "--fill has no effect without --template"),
        ("facility", ["--authorized-keys", "f"], "--authorized-keys has no effect without --gate"),
        ("coordinator", ["--venv", ""], "--venv is empty"),
        ("coordinator", ["--dtype", "float32"], "--out, --dtype and --revision have no effect without --model"),
    ],
)
def test_setup_leaves_no_option_out(side: str, words: list[str], said: str):
    ran = subprocess.run(["bash", str(ROOT / side / "setup.sh"), *words], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2 and ran.stderr.startswith(f"error: {said}") and ran.stdout == "", ran


def test_quickstart_takes_no_file_for_its_folder(tmp_path: Path):
    """It said that `.demo` in the file should be removed."""
    (tmp_path / "file").touch()
    words = ["quickstart", str(tmp_path / "file"), "--facility", "a=local", "--data", "a=x", "--model", "demo", "--yes"]
    error = CliRunner().invoke(app, words).exception
    assert isinstance(error, InputError) and "is not a folder, expected one to make" in str(error)


@pytest.mark.parametrize(
    ("words", "there", "expected"),
    [
        ("explain ", True, ["site-0", "site-1"]),
        ("setup s", False, []),
        ("status --que", False, ["--queues"]),
    ],
)
def test_a_shell_completes_facilities_and_options(words: str, there: bool, expected: list[str], tmp_path: Path):
    """Names of facilities were not completed; where there is no federation, an error stood in the line being typed."""
    if there:
        sites = "".join(f"  - {{name: site-{number}, dataset: d}}\n" for number in range(2))
        (tmp_path / "federation.yml").write_text(f"name: f\nmodel: m\nrounds: 1\nfacilities:\n{sites}")
    line = {"COMP_WORDS": f"crossfed {words}", "COMP_CWORD": "2", "_CROSSFED_COMPLETE": "complete_bash"}
    start = "import sys; sys.argv = ['crossfed']; from coordinator.cli import main; main()"
    environment = os.environ | line | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", start], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (expected, "")
