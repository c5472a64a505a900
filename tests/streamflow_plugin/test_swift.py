"""Large pieces through the system's ssh, here a stand-in that runs the remote command on this machine."""

from __future__ import annotations

import asyncio
import getpass
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from streamflow.deployment.connector.ssh import SSHConfig

from coordinator.streamflow_plugin import swift
from coordinator.streamflow_plugin.lanes import KEPT_BYTES, TransferFailed
from coordinator.streamflow_plugin.swift import SwiftLane, login_of, swift_lanes
from coordinator.testbed.command import wait_until
from facility.exchange.files.paths import CHECKOUT
from facility.exchange.process_start import started_at
from tests.streamflow_plugin.local_sshd import SSHD

CONTENT = random.Random(0).randbytes(3_000_001)
OFFSET, LENGTH = 1_000_003, 1_500_007


def config(**changes: object) -> SSHConfig:
    settings: dict = {
        "check_host_key": True,
        "client_keys": [],
        "connect_timeout": 5,
        "hostname": "far.example.org:2222",
        "password_file": None,
        "ssh_key_passphrase_file": None,
        "tunnel": None,
        "username": "alice",
    }
    return SSHConfig(**settings | changes)


@pytest.fixture
def far(tmp_path: Path, monkeypatch) -> Path:
    """The facility's folder, and an ssh that reaches it; with `refuse` there: no login. `calls` has the arguments."""
    place = tmp_path / "far"
    (tmp_path / "bin").mkdir()
    place.mkdir()
    stand_in = tmp_path / "bin" / "ssh"
    stand_in.write_text(
        f"#!/bin/bash\nprintf '%s\\n' \"$*\" >> {shlex.quote(str(place / 'calls'))}\n"
        f"cd {shlex.quote(str(place))}\n[ ! -e refuse ] || {{ echo 'Permission denied' >&2; exit 255; }}\n"
        'exec bash -c "${@: -1}"\n'
    )
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stand_in.parent}:{os.environ['PATH']}")
    return place


def with_lanes(act: Callable[[SwiftLane], Awaitable[None]], count: int = 1) -> int:
    """Lets `act` use the first of `count` lanes; returns how many there were."""

    async def run() -> int:
        async with swift_lanes(config(), count, 2) as lanes:
            if lanes:
                await act(lanes[0])
            return len(lanes)

    return asyncio.run(run())


@pytest.fixture
def near(tmp_path: Path) -> Path:
    path = tmp_path / "near"
    path.write_bytes(CONTENT)
    return path


@pytest.mark.parametrize("splices", [True, False])
def test_a_range_goes_there_and_back(far, near, monkeypatch, splices):
    if not splices:

        def refuse(*_: object, **__: object) -> int:
            raise OSError(swift.NO_SPLICE[0], "not on this file system")

        monkeypatch.setattr(os, "splice", refuse)

    async def act(lane: SwiftLane) -> None:
        with open(near, "r+b") as file:
            await lane.put("cat > piece", file.fileno(), OFFSET, LENGTH)
            await lane.get("tr a-z A-Z < piece", file.fileno(), 3, LENGTH)

    assert with_lanes(act) == 1
    piece = CONTENT[OFFSET : OFFSET + LENGTH]
    upper = bytes(byte - 32 if 97 <= byte <= 122 else byte for byte in piece)
    assert (far / "piece").read_bytes() == piece
    assert near.read_bytes() == CONTENT[:3] + upper + CONTENT[3 + LENGTH :]


@pytest.mark.parametrize(
    "command, says",
    [
        ("head -c 101 /dev/zero", "more than the 100 bytes"),
        ("echo 'dd: quota exceeded' >&2; exit 3", "quota exceeded"),
    ],
)
def test_what_was_not_listed_is_refused(far, near, command, says):
    async def act(lane: SwiftLane) -> None:
        with open(near, "r+b") as file, pytest.raises(TransferFailed, match=says):
            await lane.get(command, file.fileno(), 50, 100)

    assert with_lanes(act) == 1
    assert near.read_bytes()[150:] == CONTENT[150:] and near.read_bytes()[:50] == CONTENT[:50]


def test_fewer_bytes_than_listed_are_a_broken_connection(far, near):
    async def act(lane: SwiftLane) -> None:
        with open(near, "r+b") as file, pytest.raises(ConnectionResetError, match="gave 99 bytes, expected 100"):
            await lane.get("head -c 99 /dev/zero", file.fileno(), 50, 100)

    assert with_lanes(act) == 1


def test_a_client_that_ends_well_without_the_commands_word_is_a_broken_connection(far, near):
    """As a shared connection's client may when the connection breaks."""

    async def act(lane: SwiftLane) -> None:
        with open(near, "rb") as file, pytest.raises(ConnectionResetError, match="before the remote command ended"):
            await lane.put("cat > piece; exit 0", file.fileno(), 0, len(CONTENT))

    assert with_lanes(act) == 1


def test_a_command_that_ends_early_says_why(far, near):
    async def act(lane: SwiftLane) -> None:
        with open(near, "rb") as file, pytest.raises(TransferFailed, match="No space left"):
            await lane.put("echo 'dd: No space left on device' >&2; exit 1", file.fileno(), 0, len(CONTENT))

    assert with_lanes(act) == 1


def test_of_complaints_without_end_the_end_is_kept(far, near):
    async def act(lane: SwiftLane) -> None:
        with open(near, "rb") as file, pytest.raises(TransferFailed) as refused:
            await lane.put("cat > piece; head -c 3000000 /dev/zero >&2; exit 1", file.fileno(), 0, len(CONTENT))
        assert len(str(refused.value)) <= KEPT_BYTES

    assert with_lanes(act) == 1


def test_a_file_that_became_shorter_is_told(far, near):
    async def act(lane: SwiftLane) -> None:
        with open(near, "rb") as file, pytest.raises(TransferFailed, match="shorter"):
            await lane.put("cat > piece", file.fileno(), 0, len(CONTENT) + 1)

    assert with_lanes(act) == 1


def test_ssh_that_ends_with_255_broke(far, near):
    async def act(lane: SwiftLane) -> None:
        with open(near, "rb") as file, pytest.raises(ConnectionResetError, match="reset by peer"):
            await lane.put("echo 'reset by peer' >&2; exit 255", file.fileno(), 0, 10)

    assert with_lanes(act) == 1


def test_nothing_moves_for_long(far, near, monkeypatch):
    monkeypatch.setattr(swift, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(swift, "END_SECONDS", 0.5)

    async def act(lane: SwiftLane) -> None:
        with open(near, "rb") as file, pytest.raises(asyncio.TimeoutError):
            await lane.put("exec sleep 60", file.fileno(), 0, len(CONTENT))

    assert with_lanes(act) == 1


def test_no_login_no_lanes(far):
    (far / "refuse").touch()

    async def never(_: SwiftLane) -> None:
        raise AssertionError

    assert with_lanes(never, count=3) == 0


def test_every_call_checks_the_host_key_and_asks_nobody(far, near):
    async def act(lane: SwiftLane) -> None:
        with open(near, "rb") as file:
            await lane.put("cat >/dev/null", file.fileno(), 0, 10)

    assert with_lanes(act, count=2) == 2
    calls = (far / "calls").read_text().splitlines()
    assert len(calls) == 3
    for call in calls:
        assert (
            "StrictHostKeyChecking=yes" in call
            and "BatchMode=yes" in call
            and "-p 2222 -l alice -- far.example.org" in call
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"password_file": "secret"},
        {"ssh_key_passphrase_file": "secret"},
        {"check_host_key": False},
        {"tunnel": config(password_file="secret")},
    ],
)
def test_logins_that_are_streamflows_alone(far, changes):
    assert login_of(config()) is not None
    assert login_of(config(**changes)) is None


def test_a_killed_coordinator_leaves_no_connection(far, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import asyncio, os, signal\n"
        "from coordinator.streamflow_plugin.swift import swift_lanes\n"
        "from tests.streamflow_plugin.test_swift import config\n"
        "async def run():\n"
        "    async with swift_lanes(config(), 2, 2) as lanes:\n"
        "        print(*(lane._master.pid for lane in lanes), flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(run())\n"
    )
    done = subprocess.run(
        [sys.executable, program],
        cwd=CHECKOUT,
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: all(started_at(pid) is None for pid in pids), 10, "end of the connections")


@pytest.mark.timeout(90)
@pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd here")
def test_a_temporary_folder_with_a_long_name_costs_no_connection(site, tmp_path, monkeypatch):
    """ssh refuses a socket whose path, with what it appends while it makes one, is longer than sockets' may be."""
    site.sign("-1m:+1h")
    long = tmp_path / ("x" * (100 - len(str(tmp_path))))
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    login = config(hostname=f"127.0.0.1:{site.port}", username=getpass.getuser(), client_keys=[str(site.key)])

    async def count() -> int:
        async with swift_lanes(login, 2, 2) as lanes:
            return len(lanes)

    assert asyncio.run(count()) == 2
    assert list(long.iterdir()) == []
