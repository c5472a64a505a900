"""A command whose output nobody reads ends as any program does there; one that cannot write it says so, once."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table

from coordinator.console import SentenceConsole, command_console
from facility.exchange.exit_codes import ExitCode
from tests.conftest import ROOT

TABLE = """
import sys
from coordinator.console import SentenceConsole, command_console
from facility.exchange.errors import exit_on_error
sys.exit(exit_on_error(lambda: command_console(80).print("a table")))
"""
COMMANDS = {
    "plain": ["-m", "coordinator.cli", "schema"],
    "help": ["-m", "coordinator.cli", "--help"],
    "table": ["-c", TABLE],
}


def ended(command: list[str], stdout: int) -> tuple[int, str]:
    """Exit code and stderr of a command that prints into `stdout`."""
    done = subprocess.run([sys.executable, *command], stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_a_reader_that_is_gone_is_no_fault(name: str):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ended(COMMANDS[name], writer) == (ExitCode.UNREAD, "")
    finally:
        os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("name", COMMANDS)
def test_output_that_a_full_disk_does_not_take_is_one_sentence(name: str):
    with open("/dev/full", "wb") as full:
        code, said = ended(COMMANDS[name], full.fileno())
    assert code == ExitCode.INPUT and said.startswith("error: ") and "is full" in said and said.count("\n") == 1


CLOSED = """
import subprocess, sys
from facility.exchange.errors import exit_on_error
def main():
    file = open("file", "w")
    subprocess.run([sys.executable, "-c", "print('of a child')"], check=True)
    print("to nobody", sys.stdin.read())
    sys.stdout.buffer.write(b"as bytes")
sys.exit(exit_on_error(main))
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_a_stream_that_was_closed_is_one_that_leads_nowhere(closed: str, tmp_path: Path):
    """Else a table was a traceback, and the first file that was opened took the number of standard output."""
    for command in (CLOSED, TABLE):
        shell = f'exec "$@" {closed}'
        words = ["bash", "-c", shell, "-", sys.executable, "-c", command]
        done = subprocess.run(words, cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "file").read_bytes() == b""


BROKEN = """
import sys, typer
from coordinator.commands.app import app
from coordinator.cli import main
@app.command(rich_help_panel="Watch")
def breaks():
    raise BrokenPipeError(32, "a socket's")
sys.argv[1:] = ["breaks"]
main()
"""


def test_a_connection_that_breaks_within_a_command_is_not_taken_for_its_reader():
    code, said = ended(["-c", BROKEN], subprocess.DEVNULL)
    assert code == 1 and "a socket's" in said


def test_a_sentence_is_one_line_whatever_the_width_and_a_table_is_laid_out():
    """A path was broken by line ends, in a terminal and in a file, so that it could not be copied or searched for."""
    console = command_console(40, shown := io.StringIO())
    sentence = f"StreamFlow's log is /scratch/{'project/' * 20}streamflow.log"
    console.print(sentence, style="red", markup=False, highlight=False)
    assert shown.getvalue() == f"{sentence}\n"
    table = Table("word")
    table.add_row(sentence)
    console.print(table)
    assert max(map(len, shown.getvalue().splitlines()[1:])) == 40
    terminal = SentenceConsole(file=(shown := io.StringIO()), width=40, force_terminal=True, color_system=None)
    terminal.print(sentence)
    terminal.print("what fits is broken between its words alone, as the terminal's width asks")
    whole, *broken = (line.rstrip() for line in shown.getvalue().splitlines())
    assert whole == sentence and broken == [
        "what fits is broken between its words",
        "alone, as the terminal's width asks",
    ]
