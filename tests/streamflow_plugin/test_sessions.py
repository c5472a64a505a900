"""A real sshd that gives few sessions, a name that does not resolve for a while, and a connection that died unseen."""

from __future__ import annotations

import asyncio
import getpass
import os
import signal
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncssh
import pytest
from streamflow.core.deployment import ExecutionLocation
from streamflow.core.exception import WorkflowExecutionException
from streamflow.deployment.connector.ssh import SSHConfig

from coordinator.events.event import VARIABLE
from coordinator.events.follow import EventFile
from coordinator.streamflow_plugin import connection, lanes, sessions, ssh
from coordinator.streamflow_plugin.connection import CarefulContext
from coordinator.streamflow_plugin.lanes import TransferFailed
from coordinator.streamflow_plugin.openssh import parse_address
from coordinator.streamflow_plugin.sessions import Given, Sessions
from coordinator.streamflow_plugin.ssh import ParallelSSHConnector
from coordinator.streamflow_plugin.system_ssh import SystemSSHConnector
from coordinator.streamflow_plugin.waiting import Waiting
from tests.streamflow_plugin.local_sshd import SSHD
from tests.streamflow_plugin.test_patient_login import connector

real = pytest.mark.skipif(not Path(SSHD).exists(), reason="no sshd here")


@real
@pytest.mark.parametrize(("site", "asked"), [("MaxSessions 1", 10), ("", 1)], indirect=["site"], ids=["sshd", "ours"])
def test_one_session_in_each_connection_is_enough(site, asked: int, tmp_path: Path, monkeypatch):
    """The shell stays open all the time; a job and a look at it have connections of their own. It is told once, and
    only where it is not what the settings say."""
    events = EventFile(tmp_path / "events.jsonl")
    monkeypatch.setenv(VARIABLE, str(events.path))
    monkeypatch.setattr(sessions, "LAG_SECONDS", 0.1)
    site.sign("-1m:+1h")

    async def act() -> list[object]:
        one, location = connector(site, maxConcurrentSessions=asked)
        try:
            assert await one.run(location, ["echo shell"], capture_output=True) == ("shell", 0)
            job = one.end_of(location, one.job_line("sleep 1; echo job"), 1000, None)
            look = one.run(location, ["echo look"], stdin=asyncio.subprocess.DEVNULL, capture_output=True)
            return await asyncio.wait_for(asyncio.gather(job, look), 200)
        finally:
            await one.undeploy(False)

    assert asyncio.run(act()) == [("job", 0), ("look", 0)]
    told = [event["text"] for event in events.new() if event.kind == "problem"]
    assert ["1 at once of the 10 sessions" in text for text in told] == ([True] if asked == 10 else [])


@pytest.mark.parametrize("kind", [ParallelSSHConnector, SystemSSHConnector])
def test_a_host_that_is_away_does_not_hold_up_the_end_of_a_run(tmp_path: Path, monkeypatch, kind):
    """It is tried again for days here; who waits for it is let go."""
    events = EventFile(tmp_path / "events.jsonl")
    monkeypatch.setenv(VARIABLE, str(events.path))
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{closed.getsockname()[1]}"
        one = kind("facility-a-ssh", "/", nodes=[host], username="nobody", retries=240, retryDelay=3600)
        location = ExecutionLocation(name=host, deployment="facility-a-ssh", hostname=host, local=False)

        async def act() -> None:
            waits = asyncio.create_task(one.run(location, ["echo here"], capture_output=True))
            while not list(events.new()):  # it is told that the host is away
                await asyncio.sleep(0.05)
            await one.undeploy(False)
            with pytest.raises(WorkflowExecutionException):
                await waits

        asyncio.run(act())


def test_everybody_who_waits_for_a_host_that_is_away_is_told_why(tmp_path: Path):
    """One whose tries another command had used up was told nothing behind the colon."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{closed.getsockname()[1]}"
        one = ParallelSSHConnector("facility-a-ssh", "/", nodes=[host], username="nobody", retries=2, retryDelay=1)
        location = ExecutionLocation(name=host, deployment="facility-a-ssh", hostname=host, local=False)

        async def act() -> list[Any]:
            asked = [one.run(location, ["true"], capture_output=True) for _ in range(3)]
            return await asyncio.gather(*asked, return_exceptions=True)

        said = [str(error) for error in asyncio.run(asyncio.wait_for(act(), 100))]
    assert len(said) == 3 and all(f"{host} gives no session (2 tries): Connection refused" in one for one in said), said


@pytest.mark.parametrize("over", [False, True], ids=["waits", "run-ends"])
def test_a_host_that_answers_and_opens_no_session_is_given_up(tmp_path: Path, monkeypatch, over: bool):
    """It held its round for ever, and the end of the run: the connection lives, and nothing of it was late."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sessions, "OPEN_SECONDS", 3600.0 if over else 0.2)
    asked = asyncio.Event()

    async def silent(*_: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    async def act() -> None:
        key = asyncssh.generate_private_key("ssh-ed25519")
        server = await asyncssh.listen(
            "127.0.0.1", 0, server_host_keys=[key], server_factory=Open, process_factory=silent
        )
        monkeypatch.setattr(asyncssh.channel.SSHServerChannel, "_finish_open_request", silent)
        host = f"127.0.0.1:{server.get_port()}"
        (tmp_path / ".ssh").mkdir()
        (tmp_path / ".ssh" / "known_hosts").write_text(
            f"[127.0.0.1]:{server.get_port()} {key.export_public_key().decode()}"
        )
        one = ParallelSSHConnector("facility-a-ssh", "/", nodes=[host], username="me", retries=2, retryDelay=1)
        location = ExecutionLocation(name=host, deployment="facility-a-ssh", hostname=host, local=False)
        waits = asyncio.create_task(one.run(location, ["echo here"], capture_output=True))
        await asked.wait()
        if over:
            await one.undeploy(False)
        with pytest.raises(
            WorkflowExecutionException, match="the run ends" if over else r"gives no session \(2 tries\): \w"
        ):
            await waits
        await one.undeploy(False)
        server.close()

    asyncio.run(asyncio.wait_for(act(), 200))


def test_a_host_that_opens_no_session_is_not_waited_for_much_longer_than_one_that_is_away(monkeypatch):
    """240 tries of ten minutes were 40 hours, in place of the two that the settings say."""
    pauses, tries = [], []

    async def silent(seconds: float, _: Any) -> None:
        tries.append(seconds)
        raise TimeoutError

    waiting = Waiting()
    monkeypatch.setattr(waiting, "within", silent)
    monkeypatch.setattr(waiting, "pause", lambda seconds: asyncio.sleep(0, pauses.append(seconds)))

    async def act() -> None:
        made = Sessions(
            waiting=waiting,
            least=1,
            given=Given(10),
            cls_context=CarefulContext,
            streamflow_config_dir="",
            config=SSHConfig(True, [], 1, "h", None, None, None, "me"),
            max_connections=1,
            retries=240,
            retry_delay=30,
        )
        context = made._contexts[0]
        connection = SimpleNamespace(
            create_process=lambda *_, **__: None, abort=lambda: None, is_closed=lambda: True, _channels=[]
        )
        monkeypatch.setattr(context, "get_connection", lambda: asyncio.sleep(0, connection))
        with pytest.raises(WorkflowExecutionException, match="gives no session"):
            async with made.get("true", None):
                pass

    asyncio.run(act())
    assert 6600 <= sum(tries) + sum(pauses) <= 9000, (len(tries), pauses)


class Open(asyncssh.SSHServer):
    """Lets everybody in."""

    def begin_auth(self, username: str) -> bool:
        return False


def test_a_session_that_ends_late_at_sshd_lowers_no_limit():
    """Refused once with nine open, then with eight: sshd still counted one that had ended here."""
    given = Given(10)
    config = SSHConfig(True, [], 1, "h", None, None, None, "me")
    made = Sessions(
        waiting=Waiting(),
        least=4,
        given=given,
        cls_context=CarefulContext,
        streamflow_config_dir="",
        config=config,
        max_connections=1,
        retries=3,
        retry_delay=30,
    )
    session = made.get("true", None)
    context, there = made._contexts[0], object()
    assert [session._after_refusal(context, there, open) for open in (9, 8)] == [1.0, 1.0]
    assert given.each("h") == 10 and len(made._contexts) == 1
    assert session._after_refusal(context, there, 8) == 0.0 and given.each("h") == 8
    given.learn("h", 2)
    assert [one._max_concurrent_sessions for one in made._contexts] == [2, 2]


@real
def test_a_name_that_does_not_resolve_for_a_while_is_tried_again(site, monkeypatch):
    """As without a VPN; so is a network without a route. The first failure used to be for ever."""
    site.sign("-1m:+1h")
    connect, failures = asyncssh.connect, [socket.gaierror(-2, "Name or service not known"), OSError(113, "No route")]

    async def away(*args, **settings):
        if failures:
            raise failures.pop(0)
        return await connect(*args, **settings)

    async def act() -> None:
        one, location = connector(site)
        one.retries, one.retryDelay = 4, 0
        try:
            assert await one.run(location, ["echo in"], capture_output=True) == ("in", 0)
        finally:
            await one.undeploy(False)

    monkeypatch.setattr(asyncssh, "connect", away)
    asyncio.run(asyncio.wait_for(act(), 200))
    assert not failures


@real
def test_a_connection_that_died_unseen_is_noticed(site, tmp_path: Path, monkeypatch):
    """A firewall that forgets an idle connection tells nobody: here its sshd stops. It used to be waited for without
    end."""
    monkeypatch.setattr(connection, "ALIVE_SECONDS", 0.3)
    monkeypatch.setattr(connection, "ALIVE_COUNT", 2)
    site.sign("-1m:+1h")

    async def act() -> tuple[str, int | None]:
        one, location = connector(site)
        stopped: list[int] = []
        try:
            line = f"echo begun; touch '{tmp_path}/begun'; sleep 300"
            waiting = asyncio.create_task(one.end_of(location, line, 100, None))
            while not waiting.done() and not (tmp_path / "begun").exists():
                await asyncio.sleep(0.1)
            await asyncio.sleep(2)
            stopped = below(site.process)
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            return await asyncio.wait_for(waiting, 200)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGKILL)
            await asyncio.wait_for(one.undeploy(False), 200)

    assert asyncio.run(act()) == ("begun", None)


def below(parent: int) -> list[int]:
    """Processes that it began, and those began (proc(5)): of an account that is not root, sshd has two for each."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            after = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(after[1]) == parent:
            found += [int(status.parent.name), *below(int(status.parent.name))]
    return found


@pytest.mark.parametrize(
    ("host", "found"),
    [
        ("login.example.org", ("login.example.org", 0)),
        ("login.example.org:2222", ("login.example.org", 2222)),
        ("[2001:db8::7]", ("2001:db8::7", 0)),
        ("[2001:db8::7]:2222", ("2001:db8::7", 2222)),
    ],
)
def test_addresses_of_both_kinds(host: str, found: tuple[str, int]):
    """StreamFlow's own reading of the last two is a ValueError."""
    assert parse_address(host) == found


@real
@pytest.mark.parametrize("kind", [ParallelSSHConnector, SystemSSHConnector])
@pytest.mark.parametrize("site", ["ForceCommand head -c 3000000 /dev/zero"], indirect=True)
def test_what_a_command_prints_beside_its_answer_is_bounded(site, kind):
    """A facility that printed without end while it was sent a model filled the coordinator's memory: 8 GB in 120 s."""
    site.sign("-1m:+1h")

    async def act() -> None:
        parallel, location = connector(site)
        user, key = getpass.getuser(), str(site.key)
        one = kind("facility-a-ssh", "/", nodes=[location.name], username=user, sshKey=key, retries=2, retryDelay=1)
        lane: Any = SimpleNamespace(
            get=lambda command, **rest: one._get_ssh_client_process(
                location=location.name, command=command, encoding=None
            )
        )
        try:
            with pytest.raises(TransferFailed, match="more than 1048576 bytes beside its answer"):
                await asyncio.wait_for(lanes.feed_input(lane, "cat > piece", [b"model"]), 200)
        finally:
            await one.undeploy(False)
            await parallel.undeploy(False)

    asyncio.run(act())


@real
@pytest.mark.parametrize("site", [""], indirect=True)
def test_of_a_standard_error_without_end_the_end_is_kept(site, monkeypatch):
    """Nobody read it until the output had ended: past a channel's window the command waited until the time limit."""
    site.sign("-1m:+1h")
    kept, wait = [], asyncssh.SSHClientProcess.wait

    async def waited(process: Any) -> Any:
        result = await wait(process)
        kept.append(len(result.stderr))
        return result

    monkeypatch.setattr(asyncssh.SSHClientProcess, "wait", waited)

    async def act() -> tuple[str, int | None]:
        one, location = connector(site)
        try:
            asked = one.end_of(location, "head -c 3000000 /dev/zero >&2; echo end >&2; exit 3", 1000, None, apart=True)
            return await asyncio.wait_for(asked, 200)
        finally:
            await one.undeploy(False)

    said, code = asyncio.run(act())
    assert (len(said), said[-4:], code) == (999, "\0end", 3)  # without the last line's end
    assert kept == [0]


def test_the_distance_of_a_host_is_measured_once_and_anew_where_that_failed(monkeypatch: pytest.MonkeyPatch):
    """After a login that failed, or was called off, no transfer would have begun any more."""
    one = ParallelSSHConnector("facility-a-ssh", "/", nodes=["centre"], username="me")
    there = ExecutionLocation(name="centre", deployment="facility-a-ssh", hostname="centre", local=False)
    asked: list[object] = []

    async def worth(lane: object, *_: object) -> int:
        asked.append(lane)
        if len(asked) == 1:
            raise WorkflowExecutionException("away")
        if len(asked) == 2:
            await asyncio.sleep(3600)
        return 3

    monkeypatch.setattr(ssh, "lane_count", worth)

    async def act() -> None:
        with pytest.raises(WorkflowExecutionException, match="away"):
            await one.awake(there)
        second = asyncio.create_task(one.awake(there))
        while len(asked) < 2:
            await asyncio.sleep(0)
            assert not second.done()
        one._worth["centre"].cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        for _ in range(2):
            assert await one.awake(there) == one.lanes(there)[:3]

    asyncio.run(act())
    assert asked == [one.lanes(there)[0]] * 3
