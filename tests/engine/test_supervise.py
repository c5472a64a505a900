"""A run of the engine is watched: it ends, starts again or is given up for a reason, and leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from coordinator import console
from coordinator.engine.engine_log import last_error
from coordinator.engine.open_files import out_of_files
from coordinator.engine.queues import NoAnswer, Queue, read_queues
from coordinator.engine.supervise import Attempt, Limits, Supervisor, children, decide, fatal_reason
from coordinator.events.event import KINDS, VARIABLE, Event
from coordinator.events.follow import EventFile
from coordinator.schedulers.scheduler import Job
from coordinator.schedulers.slurm import SCHEDULER as SLURM
from facility.exchange.errors import InputError, TransientError
from tests.engine.messages import engine_messages

ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(restarts=2, pause_seconds=10)
FAILED = Attempt(code=1, new_rounds=0)


@pytest.mark.parametrize(
    ("attempts", "expected", "words"),
    [
        ([Attempt(code=0, new_rounds=2)], "done", ""),
        ([FAILED], "again", "code 1"),
        ([FAILED, FAILED, FAILED], "give up", "3 starts brought no new"),
        ([FAILED, FAILED, Attempt(code=1, new_rounds=1)], "again", ""),
        ([FAILED, FAILED, Attempt(code=1, new_rounds=1), FAILED, FAILED], "again", ""),
        ([Attempt(code=-15, new_rounds=0, hung=True)], "again", "hung"),
        ([Attempt(code=1, new_rounds=3, fatal="the host key changed")], "give up", "host key"),
    ],
)
def test_what_happens_next(attempts: list[Attempt], expected: str, words: str):
    decision = decide(attempts, LIMITS)
    assert decision.next == expected and words in decision.reason


def test_pauses_double_and_stay_below_five_minutes():
    pauses = [decide([FAILED] * n, Limits(restarts=20, pause_seconds=10)).pause_seconds for n in range(1, 10)]
    assert pauses[:3] == [10, 20, 40] and max(pauses) == 300


def test_only_a_person_can_fix_a_wrong_host_key_or_a_refusing_start():
    def of(kind: str, **fields) -> str:
        assert set(fields) == set(KINDS[kind])
        return fatal_reason(Event(kind=kind, fields=fields))

    told = of("host_key", host="10.1.1.2", owner="", reason="Host key is not trusted")
    assert "host key of 10.1.1.2" in told and "ssh-keygen -R '10.1.1.2'" in told and "Where it has none" in told
    told = of("host_key", host="login.site:2222", owner="", reason="Host key is not trusted")
    assert "ssh-keygen -R '[login.site]:2222'" in told, "known_hosts has it by its port"
    told = of("host_key", host="login.site:22", owner="login.site", reason="Certificate expired for host login.site")
    assert "-R 'login.site'" in told and "(Certificate expired" in told and "login to" not in told, "but not by 22"
    told = of("host_key", host="login.site", owner="[jump.site]:2222", reason="Host key is not trusted")
    assert "host key of [jump.site]:2222 (login to login.site)" in told and "-R '[jump.site]:2222'" in told
    assert of("login_refused", facility="a", host="login.site", reason="Permission denied") == "", "it is waited for"
    assert of("failed", step="/start", reason="the archive is damaged", futile=False) == "start: the archive is damaged"
    assert "disk" in of("failed", step="/rounds/aggregate", reason="the disk is full", futile=True)
    assert of("failed", step="/rounds/receive_a", reason="it ended with code 137: ", futile=False) == ""
    assert of("problem", text="HOST KEY of login.site is not the one in known_hosts") == ""


def supervisor(tmp_path: Path, script: str, queues: list[Queue] | None = None, **limits) -> Supervisor:
    lines: list[str] = []
    said = engine_messages()
    events = EventFile(tmp_path / "events.jsonl")
    result = Supervisor(
        command=lambda: [sys.executable, "-u", "-c", script],
        directory=tmp_path,
        environment=os.environ | {VARIABLE: str(events.path), "PYTHONPATH": str(ROOT)},
        events=events,
        queues=queues or [],
        on_line=lines.append,
        rounds_done=lambda: 0,
        limits=Limits(**({"pause_seconds": 0.1, "restarts": 1, "stop_seconds": 1.0, "silence_seconds": 60} | limits)),
    )
    result.lines, result.said = lines, said  # type: ignore[attr-defined]
    return result


def test_success_is_passed_on(tmp_path: Path):
    one = supervisor(tmp_path, "print('hello')")
    assert one.run() == (0, "StreamFlow ended well")
    assert one.lines == ["hello"]


def test_a_failing_run_starts_again_and_then_is_given_up(tmp_path: Path):
    one = supervisor(tmp_path, "raise SystemExit(3)")
    code, reason = one.run()
    assert code == 3 and "2 starts" in reason and len(one.attempts) == 2


def test_a_run_that_is_stopped_says_so_and_names_who_keeps_it_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Over a link that was down, Ctrl-C was followed by more than a minute without a word, and people gave it again."""

    class Away(Queue):
        def _ask(self, command: str) -> str:
            deadline = time.monotonic() + 60
            while stopping.is_set() and not any(one.endswith("waiting for lumi") for one in said):  # not for vega, too
                assert time.monotonic() < deadline, said
                time.sleep(0.01)
            raise NoAnswer("lumi does not answer: connection timed out")

    class Near(Queue):
        def _ask(self, command: str) -> str:
            return ""

    stopping = threading.Event()
    monkeypatch.setattr(console, "REPORT_SECONDS", 0.05)
    queues = [
        kind(facility=name, kind="slurm", job_name="n", directory=tmp_path, ssh={})
        for kind, name in ((Away, "lumi"), (Near, "vega"))
    ]
    one = supervisor(tmp_path, "import time; print('up', flush=True); time.sleep(100)", queues)
    said = engine_messages()

    def stop(line: str) -> None:
        stopping.set()
        one.stop(signal.SIGINT)

    one.on_line = stop
    assert one.run() == (128 + signal.SIGINT, "stopped")
    words = [text for text in said if "vega" not in text]
    assert words[0].startswith("stopping") and words[-2] == "jobs are being cancelled, waiting for lumi"
    assert words[-1].startswith("lumi does not answer: connection timed out; a job of ours may go on there")


def test_a_hanging_run_is_killed_even_when_it_ignores_sigterm(tmp_path: Path):
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(100)"
    one = supervisor(tmp_path, script, silence_seconds=1.0, restarts=0)
    code, reason = one.run()
    assert code == 1 and "hung" in reason, "a code of the shell's, not of the signal that we sent"
    assert any("no progress" in sentence for sentence in one.said)


def test_a_run_that_may_open_no_further_file_is_no_silence(tmp_path: Path):
    """StreamFlow hangs after it; what a facility says of its own files is no reason."""
    log = "2026-11-28 06:18:09.494 ERROR    [Errno 24] Too many open files: '/dev/null'"
    one = supervisor(tmp_path, f"import time; print({log!r}); time.sleep(100)")
    code, reason = one.run()
    assert len(one.attempts) == 2
    assert code == 2 and "may open no further file" in reason and "twice in a row" in reason and "ulimit" in reason
    said = "2026-11-28 06:18:09.494 ERROR    a is left out of the round: [Errno 24] Too many open files"
    assert out_of_files(log) and not out_of_files(said) and not out_of_files("[Errno 24] Too many open files")


def test_the_error_that_streamflow_ends_with_is_told(tmp_path: Path):
    """Of a work directory that takes no locks it said "disk I/O error", and the run "ended with code 1"."""
    log = ["2026-11-29 22:52:40.001 INFO     Processing", "2026-11-29 22:52:43.701 ERROR    disk I/O error"]
    log += ["Traceback (most recent call last):", "sqlite3.OperationalError: disk I/O error"]
    one = supervisor(
        tmp_path, f"print({log!r}, sep=chr(10)); raise SystemExit(1)".replace("print(", "print(*"), restarts=0
    )
    assert one.run() == (1, "StreamFlow ended with code 1: disk I/O error; 1 start brought no new complete round")
    assert last_error("2026-11-29 22:52:44.000 INFO     COMPLETED", "disk I/O error") == ""


def test_as_many_files_as_the_system_lets_this_account_open_are_asked_for():
    words = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (64, 512)); "
    words += "from coordinator.engine.open_files import allow_open_files; allow_open_files(); allow_open_files(); "
    words += "import subprocess; subprocess.run(['sh', '-c', 'ulimit -Sn; ulimit -Hn'])"
    told = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["512", "512"]


@pytest.mark.slow
def test_silence_with_a_working_child_is_patience(tmp_path: Path):
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(25)'])"
    one = supervisor(tmp_path, script, silence_seconds=10.0)
    assert one.run()[0] == 0 and len(one.attempts) == 1


EMIT = "from coordinator.events.event import emit; import time; {}; time.sleep(100)"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("emit('host_key', host='10.1.1.2', owner='', reason='')", "host key"),
        ("emit('failed', step='/start', reason='the archive is damaged', futile=True)", "archive is damaged"),
    ],
)
def test_what_only_a_person_can_fix_ends_at_once_with_a_sentence(tmp_path: Path, what: str, words: str):
    one = supervisor(tmp_path, EMIT.format(what), restarts=5)
    code, reason = one.run()
    assert code == 2 and words in reason and len(one.attempts) == 1


def test_a_step_that_fails_twice_for_one_reason_is_not_tried_a_third_time(tmp_path: Path):
    what = "emit('failed', step='/rounds/aggregate', reason='it ended with code 1: bug', futile=False)"
    one = supervisor(tmp_path, EMIT.format(what), restarts=5)
    code, reason = one.run()
    assert code != 0 and "aggregate: it ended with code 1: bug (twice" in reason and len(one.attempts) == 2


class FakeQueue(Queue):
    """A queue that remembers what it was asked."""

    def _named(self, name: str) -> list[Job]:
        if self.ssh.get("down"):
            raise TransientError("site does not answer")
        return list(self.ssh["jobs"])

    def _ask(self, command: str) -> str:
        self.ssh["asked"].append(command)
        return ""


def fake(*jobs: Job, down: bool = False) -> FakeQueue:
    return FakeQueue(
        facility="site",
        kind="slurm",
        job_name="crossfed-f-site",
        directory=Path("/"),
        ssh={"jobs": list(jobs), "asked": [], "down": down},
    )


def test_jobs_in_a_queue_are_patience_and_a_silent_facility_too(tmp_path: Path):
    script = "import time; time.sleep(2.5)"
    for queue in (fake(Job(id="1", state="RUNNING", began=True)), fake(down=True)):
        one = supervisor(tmp_path, script, [queue], silence_seconds=1.0)
        assert one.run()[0] == 0 and len(one.attempts) == 1


def test_stopping_cancels_our_jobs_by_name(tmp_path: Path):
    queue = fake(Job(id="9", state="RUNNING", began=True))
    one = supervisor(tmp_path, "import time; print('up'); time.sleep(100)", [queue])
    threading.Timer(1.5, one.stop, [signal.SIGINT]).start()
    code, reason = one.run()
    assert code == 128 + signal.SIGINT and reason == "stopped"
    assert queue.ssh["asked"] == [SLURM.cancel("crossfed-f-site")]
    assert any("cancelled job 9" in sentence for sentence in one.said)


def test_while_a_facility_is_away_the_run_is_seen_to_live(tmp_path: Path):
    """Ticks renew the snapshot by which `crossfed status --follow` tells a run from one that was killed."""
    ticked, seen = threading.Event(), []

    class Away(FakeQueue):
        def _named(self, name: str) -> list[Job]:
            seen.append(ticked.wait(200))
            raise TransientError("site does not answer")

    away = Away(facility="site", kind="slurm", job_name="crossfed-f-site", directory=Path("/"), ssh={})
    one = supervisor(tmp_path, "", [away])
    one.on_tick = ticked.set
    assert one.run()[0] == 0
    assert seen == [True], "before the first start"


def test_before_a_start_only_waiting_jobs_are_cancelled(tmp_path: Path):
    queue = fake(Job(id="8", state="PENDING", began=False), Job(id="9", state="RUNNING", began=True))
    assert supervisor(tmp_path, "", [queue]).run()[0] == 0
    assert queue.ssh["asked"] == [SLURM.cancel_waiting("crossfed-f-site")]


def test_children_are_found_below_shells():
    import subprocess

    process = subprocess.Popen(["sh", "-c", "sleep 30 & wait"])
    try:
        deadline = time.monotonic() + 200
        while not (found := children(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(found) == 1
    finally:
        for pid in [*children(process.pid), process.pid]:
            os.kill(pid, signal.SIGKILL)
        process.wait()


def test_processes_of_others_have_names_in_any_encoding():
    """Names are cut after 15 bytes, within a letter too."""
    import subprocess

    code = "open('/proc/self/comm', 'wb').write(b'caf\\xc3'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert process.pid in children(os.getpid())
        process.kill()


def test_queues_before_anything_was_rendered_name_the_command_that_renders(tmp_path: Path):
    with pytest.raises(InputError, match="crossfed render"):
        read_queues(tmp_path / "streamflow.yml")


def test_queues_are_read_from_the_rendered_file(tmp_path: Path):
    file = tmp_path / "streamflow.yml"
    file.write_text("""
workflows:
  demo:
    bindings:
    - {step: /, target: {deployment: coordinator}}
    - {step: /rounds/train_site-a, target: {deployment: a, service: train}}
    - {step: /rounds/train_site-b, target: {deployment: b}}
    - {step: /rounds/train_site-c, target: [{deployment: c, service: s}]}
    - {step: /rounds/train_site-d, target: {deployment: d, service: train}}
deployments:
  coordinator: {type: local, config: {}}
  a-ssh: {type: ssh, config: {nodes: [login.a], username: me}}
  a: {type: slurm, config: {services: {train: {jobName: crossfed-demo-site-a}}}, wraps: a-ssh}
  b: {type: local, config: {}}
  c: {type: pbs, config: {services: {s: {jobName: name}}}, wraps: {deployment: a-ssh}}
  d: {type: flux, config: {services: {train: {jobName: here}}}}
""")
    queues = read_queues(file)
    assert [(queue.facility, queue.kind, queue.job_name) for queue in queues] == [
        ("site-a", "slurm", "crossfed-demo-site-a"),
        ("site-c", "pbs", "name"),
        ("site-d", "flux", "here"),
    ]
    assert queues[2].ssh == {}, "the coordinator stands on the login node: the queue is its own"
    assert queues[0].ssh["nodes"] == ["login.a"] and queues[0].directory == tmp_path


def test_a_directory_that_takes_no_file_is_told_at_once_and_ends_a_run_in_which_nothing_moves(tmp_path: Path, caplog):
    """The job that still works is waited for; only then the run ends, without another start."""
    begun, marker = tmp_path / "begun", tmp_path / "worked"
    child = f"import time, pathlib; pathlib.Path({str(begun)!r}).touch(); time.sleep(2)"
    child += f"; pathlib.Path({str(marker)!r}).touch()"
    script = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {child!r}]); time.sleep(100)"
    one = supervisor(tmp_path, script, probe_seconds=0.1, refused_seconds=0.5)
    full = f"{tmp_path} is full: free some room, then give the same command again"
    one.unwritable = lambda: full if begun.exists() else ""
    code, reason = one.run()
    assert marker.exists()
    assert code == 2 and reason == full and len(one.attempts) == 1
    assert caplog.messages[0] == f"{tmp_path} is full: free some room; nothing is lost, jobs at work go on"
