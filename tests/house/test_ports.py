"""A port that a test has for what it starts is nobody else's until that listens there."""

from __future__ import annotations

import secrets
import socket
import subprocess
import sys

import pytest

from facility.launching.place import PORTS as JOBS
from tests.conftest import ROOT
from tests.ports import PORTS, Ports

OTHER = "import sys; from tests.ports import Ports; own = Ports({}, 9); print(own.take(), flush=True); sys.stdin.read()"


@pytest.fixture
def few() -> range:
    """Four ports that nothing of this machine has, and no test asks for."""
    first = 11000 + 4 * secrets.randbelow(200)
    return range(first, first + 4)


def test_no_process_is_given_what_another_was(few: range):
    command = [sys.executable, "-c", OTHER.format(few)]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin and other.stdout
        theirs, own = int(other.stdout.readline()), Ports(few, 9)
        assert {own.take() for _ in range(3)} == {*few} - {theirs}
        with pytest.raises(RuntimeError, match="all taken"):
            own.take()
        other.stdin.close()
    assert own.take() == theirs  # the other has ended


def test_nor_one_at_which_something_listens(few: range):
    with socket.create_server(("127.0.0.1", few[0])):
        own = Ports(few, 9)
        assert {own.take() for _ in range(3)} == {*few[1:]}


def test_nor_one_that_a_job_takes():
    first, count = JOBS
    assert not {*PORTS} & {*range(first, first + count)}
