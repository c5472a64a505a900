"""What a watched run shows, records and reports follows from its events, and from nothing a facility could forge."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from coordinator.archive.journal import KINDS as LINES
from coordinator.archive.journal import Journal
from coordinator.archive.rounds import RoundFile
from coordinator.config.federation import read_federation
from coordinator.config.notifying import NotifySettings
from coordinator.engine import follow_run as follow
from coordinator.engine.expected_end import expected_end
from coordinator.engine.follow_run import follow_run
from coordinator.engine.live import (
    FILE,
    FacilityState,
    Snapshot,
    facility_sentence,
    live_lines,
    live_table,
    read_snapshot,
)
from coordinator.engine.notify import Notifier
from coordinator.engine.progress import Progress
from coordinator.engine.recorder import SILENT_SECONDS, Recorder
from coordinator.events.event import KINDS, VARIABLE, Event
from coordinator.events.follow import EventFile
from coordinator.report.timeline import segments
from coordinator.steps.limits import job_seconds
from coordinator.streamflow_plugin.job_progress import JobWatch, command
from facility.exchange.errors import ConfigurationError, InputError, ManifestError
from facility.exchange.files.durable import write_json
from facility.exchange.messages.progress import MOST_BYTES, JobProgress, read_progress, write_progress
from tests.engine.engines import crossfed
from tests.engine.messages import engine_messages
from tests.federations import write_federation

STEP = "/rounds/train_a"
SECONDS = (100.0, 300.0, 200.0)
AT_WORK = {"stage": "training", "done": 3, "steps": 8, "loss": 2.5, "tokens_per_second": 120.0, "seconds_left": 50.0}


def event(kind: str, at: float = 0.0, **fields) -> Event:
    assert set(fields) == set(KINDS[kind])
    return Event(kind=kind, fields=fields, time=at)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"step": -1}',
        '{"step": 1e3}',
        '{"loss": NaN}',
        '{"loss": "2"}',
        '{"stage": "mining"}',
        '{"step": 1, "step": 2}',
        '{"shell": "rm"}',
        '{"tokens_per_second": 1e300}',
        '{"step": 1}' + " " * MOST_BYTES + "]",
        "[" * 5000,
    ],
)
def test_a_progress_file_that_is_none_is_refused(text: str):
    if text.endswith("]") and text.startswith('{"step"'):
        assert read_progress(text).step == 1  # what lies beyond the size that is read does not exist
        return
    with pytest.raises(ManifestError):
        read_progress(text)


def test_a_job_is_looked_at_by_one_plain_command_and_emits_only_changes(tmp_path: Path, monkeypatch):
    events = EventFile(tmp_path / "events")
    monkeypatch.setenv(VARIABLE, str(events.path))
    answers = ['{"stage": "loading", "time": 1}', '{"stage": "loading", "time": 1}', "garbage", None, '{"step": 2}']
    asked: list[list[str]] = []

    async def ask(words: list[str]) -> str | None:
        asked.append(words)
        return answers.pop(0)

    watch = JobWatch(step=STEP, directory="/scratch/it's", ask=ask)

    async def look() -> None:
        while answers:
            await watch.look()

    asyncio.run(look())
    assert asked == [command("/scratch/it's")] * 5 and len(asked[0]) == 4 and asked[0][0] == "head"
    assert subprocess.run(
        ["sh", "-c", f"printf '%s\\n' {' '.join(asked[0])}"], capture_output=True
    ).stdout.decode() == ("head\n-c\n4096\n/scratch/it's/progress.json\n")
    assert [(one["stage"], one["done"]) for one in events.new()] == [("loading", 0), ("training", 2)]


def recorder(tmp_path: Path, **notify) -> tuple[Recorder, Progress, dict[str, float]]:
    now = {"now": 1000.0}
    progress = Progress(["a", "b"], rounds=2, clock=lambda: now["now"], wall=lambda: now["now"])
    settings = NotifySettings(**notify)
    notifier = Notifier("f", settings, tmp_path)
    (tmp_path / "archive").mkdir(exist_ok=True)
    made = Recorder(
        federation="f",
        progress=progress,
        journal=Journal(tmp_path / "archive"),
        notifier=notifier,
        workdir=tmp_path,
        clock=lambda: now["now"],
    )
    return made, progress, now


def begun() -> list[Event]:
    """Of a job of round 0 that was submitted at 10 and left its queue at 40."""
    return [
        event("starting", at=1, round=0, model="m"),
        event("submitted", at=10, step=STEP, job="17"),
        event("began", at=40, step=STEP, job="17"),
    ]


def feed(made: Recorder, *events: Event) -> None:
    for one in events:
        made.progress.feed(one)
        made.hear(one)


def test_a_requeued_job_waits_again_and_is_not_shown_at_work(tmp_path: Path):
    """Preempted at 100, it waits until 400 and trains again until 500; the steps of its first run are not shown."""
    made, progress, now = recorder(tmp_path)
    feed(
        made,
        *begun(),
        event("progress", at=50, step=STEP, **AT_WORK),
        event("requeued", at=100, step=STEP, job="17"),
    )
    assert progress.states["a"] == "queued as job 17" and not progress.live["a"].stage
    now["now"] = 1060.0
    said = facility_sentence(progress.live["a"], 1060.0)
    assert " for 60 s" in said and "step" not in said
    feed(
        made,
        event("began", at=400, step=STEP, job="17"),
        event("progress", at=410, step=STEP, **AT_WORK),
        event("ended", at=500, step=STEP, job="17", code=0, problem=""),
    )
    entries = made.journal.read()
    assert progress.states["a"] == "training"
    assert [one.kind for one in entries if one.facility] == [
        *("queued", "started", "stage", "requeued", "started", "stage", "trained")
    ]
    spans = [(one.kind, one.begin, one.end) for one in segments(entries, {})]
    assert spans == [
        *(("queue", 10, 40), ("load", 40, 50), ("train", 50, 100)),
        *(("queue", 100, 400), ("load", 400, 410), ("train", 410, 500)),
    ]
    assert job_seconds(entries) == {(0, "a"): 60.0 + 100.0}, "nodes that it did not have are not paid for"


def test_a_job_that_a_killed_run_left_at_work_is_what_is_waited_for(tmp_path: Path):
    """Its steps are not heard of: until its end the facility is not shown as one that trains and says nothing."""
    made, progress, now = recorder(tmp_path)
    train = [event("starting", at=1, round=0, model="m"), event("executing", at=2, step=STEP)]
    feed(made, *train, event("earlier", at=10, facility="a", job="17"))
    now["now"] = 1100.0
    said = facility_sentence(progress.live["a"], 1100.0)
    assert said.startswith("waiting for the end of job 17, of an earlier run, for ")
    feed(made, event("submitted", at=200, step=STEP, job="18"))
    assert progress.states["a"] == "queued as job 18"


def test_a_job_that_waits_for_an_earlier_one_of_its_round_is_not_shown_as_one_that_trains(tmp_path: Path):
    """A run that was killed leaves the jobs of this machine at work."""
    made, progress, _ = recorder(tmp_path)
    feed(made, event("starting", at=1, round=0, model="m"), event("executing", at=2, step=STEP))
    waits = {"stage": "waiting", "done": 0, "steps": 0, "loss": None, "tokens_per_second": 0.0, "seconds_left": None}
    told = progress.feed(event("progress", at=10, step=STEP, **waits))
    assert told == "round 0: a: an earlier job of this round is at work: its end is waited for"
    assert facility_sentence(progress.live["a"], 1100.0).startswith("waiting for an earlier job for ")
    feed(made, event("progress", at=20, step=STEP, **AT_WORK))
    assert facility_sentence(progress.live["a"], 1100.0).startswith("training for ")


def test_a_late_job_that_is_requeued_stays_late(tmp_path: Path):
    made, progress, _ = recorder(tmp_path)
    feed(
        made,
        *begun(),
        event("late", at=50, facility="a", round=0, reason="the others have delivered"),
        event("requeued", at=60, step=STEP, job="17"),
    )
    assert progress.states["a"] == "late"


def test_a_job_from_the_queue_to_its_update(tmp_path: Path):
    made, progress, now = recorder(tmp_path)
    made.begin(0, {"a": 3600.0})
    feed(
        made,
        event("starting", at=1, round=0, model="m"),
        event("moved", at=2, facility="a", way="to", what="model", bytes=10, seconds=0.5),
        event("moved", at=2, facility="a", way="to", what="a.json", bytes=10, seconds=0.5),
        event("submitted", at=3, step=STEP, job="17"),
        event("estimated", step=STEP, job="17", begins="2026-11-22T11:00:00"),
    )
    now["now"] = 1042.0
    made.write()
    snapshot = read_snapshot(tmp_path)
    assert snapshot is not None
    line = live_lines(snapshot, 1042.0)[0]
    assert "queued as job 17 for 42 s" in line.replace(line[line.index(" since") : line.index(" for 42")], "")
    assert "expected to begin 2026-11-22T11:00:00" in line
    feed(made, event("began", at=4, step=STEP, job="17"), event("progress", at=1040, step=STEP, **AT_WORK))
    made.write()
    snapshot = read_snapshot(tmp_path)
    assert snapshot is not None
    assert live_lines(snapshot, 1042.0)[0].endswith(
        "training for 0 s, step 3 of 8, loss 2.5000, 120 tokens/s, 50 s left, heard 2 s ago"
    )
    feed(
        made,
        event("ended", at=5, step=STEP, job="17", code=0, problem=""),
        event("moved", at=6, facility="a", way="from", what="update", bytes=20, seconds=1.0),
        event("received", at=7, facility="a", round=0),
        event("refused", at=7, facility="b", round=0, reason="its node burnt"),
        event("log", at=7, facility="b", round=0, lines=["Traceback", "fire"]),
        event("executing", at=8, step="/rounds/aggregate"),
        event("complete", at=9, round=0, decision="go on"),
    )
    entries = made.journal.read()
    assert [(one.kind, one.facility) for one in entries if one.kind != "run_started"] == [
        ("round_started", ""),
        ("sent", "a"),
        ("queued", "a"),
        ("started", "a"),
        ("stage", "a"),
        ("trained", "a"),
        ("transferred", "a"),
        ("verified", "a"),
        ("refused", "b"),
        ("log", "b"),
        ("averaging", ""),
        ("averaged", ""),
    ]
    assert {one.round for one in entries if one.kind not in ("run_started",)} == {0}
    assert all(one.kind in LINES for one in entries)


def test_what_is_shown_goes_on_where_the_clock_is_set_back(tmp_path: Path):
    """For an hour that it was set back, `crossfed status --follow` showed what had been an hour before."""
    made, _, now = recorder(tmp_path)
    for clock in (1000.0, 1001.0, 400.0, 403.0):
        now["now"] = clock
        made.tick()
        shown = read_snapshot(tmp_path)
        assert shown is not None and shown.time == (1000.0 if clock == 1001.0 else clock)


def on_a_terminal(snapshot: Snapshot, width: int) -> list[str]:
    """The lines of its table, in a terminal of so many characters."""
    console = Console(width=width, file=StringIO(), color_system=None)
    console.print(live_table(snapshot, 2000.0))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_heading_takes_the_terminals_width_and_not_that_of_a_narrow_table():
    states = {"a": FacilityState(state="done", since=1990.0)}
    heading = "federation of two facilities with a long name, round 17"
    snapshot = Snapshot(federation="f", heading=heading, coordinator="averaging", time=1.0, facilities=states)
    assert on_a_terminal(snapshot, 80)[0].rstrip() == f"{heading}: averaging"
    console = Console(width=80, file=StringIO(), color_system=None)
    below = "global perplexity as received, round by round: 340.1, 228.4"
    console.print(live_table(snapshot, 2000.0, below=below))
    assert console.file.getvalue().splitlines()[-1] == below  # type: ignore[attr-defined]


@pytest.mark.parametrize("at_work", [0, 1, 2, 3])
@pytest.mark.parametrize("seconds", [9.0, 1990.0, 9000.0])
@pytest.mark.parametrize(("name", "steps"), [("site-", 99), ("leonardo", 1000)])
def test_a_small_terminal_shows_every_facility_whole(at_work: int, seconds: float, name: str, steps: int):
    """80x24, three facilities: nothing is cut off, neither numbers nor when a waiting job is expected to begin."""
    since = 2000.0 - seconds
    queued = FacilityState(state="queued as job 4711234", since=since, begins="2026-11-22T11:00:00")
    training = FacilityState(state="training", since=since, stage="training", step=steps - 1, steps=steps, loss=6.851)
    training = dataclasses.replace(training, tokens_per_second=79400.0, seconds_left=seconds, heard=1998.0)
    states = {f"{name}{n}": training if n < at_work else queued for n in range(3)}
    snapshot = Snapshot(federation="", heading="round 0 (0 of 9)", coordinator="x", time=2000.0, facilities=states)
    lines = on_a_terminal(snapshot, 80)
    assert len(lines) < 24 and all(line.rstrip()[-1] in "┓┃┩│┘" for line in lines[1:]), lines
    text = "\n".join(lines)
    assert "…" not in text and ("loss" in text) is bool(at_work), "a column that holds nothing takes no room"
    assert [text.count(word) for word in ("4711234", "11:00")] == [3 - at_work] * 2, lines
    assert [text.count(word) for word in (" training ", " 6.8510 ", " 79,400 ", " 2 s ")] == [at_work] * 4, lines


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
@pytest.mark.parametrize("name", ["karolina", "mn5", "facility-of-a-university-hpc-0"])
def test_a_narrow_terminal_leaves_columns_out_and_breaks_no_name_into_letters(name: str, width: int):
    """At 60 columns facilities had two letters a line, at 40 none, and numbers lost their last digits."""
    training = FacilityState(state="training", since=1700.0, stage="training", step=1234, steps=5000, loss=2.3456)
    training = dataclasses.replace(training, tokens_per_second=123456.0, seconds_left=3600.0, heard=1980.0)
    states = {name: training, "vega": FacilityState(state="exit status 1: out of memory", since=100.0)}
    snapshot = Snapshot(federation="", heading="round 0", coordinator="x", time=2000.0, facilities=states)
    lines = on_a_terminal(snapshot, width)
    assert max(map(len, lines)) <= width
    rows = [[cell.strip() for cell in line.split("│")] for line in lines if line.startswith("│")]
    first = next(at for at, row in enumerate(rows) if row[1] == "vega")
    assert "".join(row[1] for row in rows[:first]) == name and first <= 3, lines
    assert " ".join(row[2] for row in rows[first:]).split() == "exit status 1: out of memory".split(), lines
    text = " ".join(" ".join(lines).split())
    left_out = text.partition("too narrow to show: ")[2].split(", ") if "too narrow" in text else []
    whole = {"tokens/s": "123,456", "last heard": "20 s", "loss": "2.3456", "time left": "60 min", "for": "5 min"}
    for column, figure in whole.items():
        assert (f" {figure} " in text) == (column not in left_out), (column, lines)
    assert left_out == ["tokens/s", "last heard", "loss", "step", "time left", "for"][: len(left_out)]
    assert bool(left_out) == (width < 80 or (width == 80 and len(name) > 16)), lines


def test_the_heading_says_that_the_coordinator_waits_while_facilities_work(tmp_path: Path):
    """Not that it still looks at the archive, hours after it has."""
    progress = Progress(["a"], rounds=2)
    seen = []
    for told in (
        event("starting", round=0, model="m"),
        event("executing", step="/start"),
        event("executing", step=STEP),
        event("executing", step="/rounds/aggregate"),
        event("complete", round=0, decision="go on"),
        event("executing", step=STEP),
    ):
        progress.feed(told)
        seen.append(progress.step)
    waits = "waiting for the facilities"
    assert seen == ["starting", "looking at the archive", waits, "averaging", "between rounds", waits]


def test_the_end_of_all_rounds_is_expected_by_the_time_of_the_last_ones(tmp_path: Path):
    """Rounds of 100, 300 and 200 s; the one under way began at 1000 s, and three are left of six."""
    rounds = [
        RoundFile(round=n, facilities=[], global_loss=None, decision="", seconds=s) for n, s in enumerate(SECONDS)
    ]
    assert expected_end(rounds, left=3, begun=1000.0) == (1200.0, 400.0)
    assert expected_end(rounds, left=0, begun=1000.0) == expected_end([], left=3, begun=1.0) == (0.0, 0.0)
    assert expected_end([dataclasses.replace(rounds[0], seconds=0.0)], left=3, begun=1.0) == (0.0, 0.0)
    made, progress, now = recorder(tmp_path)
    progress.rounds = 6
    for entry in rounds:
        made.journal.path.parent.joinpath(f"round-{entry.round:04d}").mkdir()
        write_json(made.journal.path.parent / f"round-{entry.round:04d}" / "round.json", dataclasses.asdict(entry))
    feed(made, event("starting", at=1000, round=3, model="m"))
    now["now"] = 1050.0
    made.write()
    snapshot = read_snapshot(tmp_path)
    assert snapshot is not None and (snapshot.round_end, snapshot.rounds_after) == (1200.0, 400.0)
    clock = time.strftime("%H:%M", time.localtime(1600.0))
    assert live_lines(snapshot, 1050.0)[-1].endswith(f"all rounds are expected to be complete about {clock}")
    assert f"complete about {clock}" in str(live_table(snapshot, 1050.0).renderables[0])
    later = dataclasses.replace(snapshot, rounds_after=400.0 + 3 * 86400)
    day = time.strftime("%Y-%m-%d", time.localtime(1600.0 + 3 * 86400))
    assert f"about {day} " in live_lines(later, 1050.0)[-1]
    overdue = "this round takes longer than the last ones; those after it are expected to take 6:40 min"
    for now_ in (1201.0, 1350.0, 5000.0):
        assert live_lines(snapshot, now_)[-1].endswith(overdue), "no time that moves on with the clock"
    assert live_lines(dataclasses.replace(snapshot, rounds_after=0.0), 1350.0)[-1].endswith("than the last ones")
    assert "expected" not in live_lines(dataclasses.replace(snapshot, ended="done"), 1050.0)[-1]


def test_a_line_that_a_crash_cut_is_passed_over_and_costs_no_other(tmp_path: Path):
    journal = Journal(tmp_path)
    journal.append("round_started", time=1.0, round=3)
    with open(journal.path, "a") as file:
        file.write('{"time": "2026')
    assert [(one.kind, one.round) for one in journal.read()] == [("round_started", 3)]
    journal.append("run_started", time=2.0, rounds=3)
    journal.append("round_started", time=3.0, round=3)
    assert [one.kind for one in journal.read()] == ["round_started", "run_started", "round_started"]


def test_each_occasion_is_told_once_to_command_and_webhook(tmp_path: Path):
    received: list[dict] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    (tmp_path / "secret").write_text(f"http://127.0.0.1:{server.server_port}/hook\n")
    script = "import sys; open('told', 'a').write(sys.stdin.read() + '\\n')"
    made, progress, now = recorder(tmp_path, command=[sys.executable, "-c", script], webhook="file:secret")
    progress.feed(event("starting", round=0, model="m"))
    refused = event("login_refused", facility="a", host="login.a", reason="Permission denied")
    works = event("login_works", facility="a", host="login.a")
    lost = event("refused", facility="b", round=0, reason="gone\x1b[2J")
    feed(made, refused, refused, works, refused, lost, lost)
    made.stuck("a", "7", "JobHeldUser", "release it")
    made.stuck("a", "7", "JobHeldUser", "release it")
    feed(made, works, event("progress", at=now["now"], step=STEP, **AT_WORK))
    now["now"] += SILENT_SECONDS + 1
    made.tick()
    now["now"] += 10
    made.tick()
    made.end(0, "", done=True)
    made.notifier.close()
    server.shutdown()
    told = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    expected = [("login", "a"), ("login", "a"), ("lost", "b"), ("stuck", "a"), ("stuck", "a"), ("done", "")]
    assert [(one["event"], one["facility"]) for one in told] == expected
    assert [(one["event"], one["facility"]) for one in received] == expected
    assert "\x1b" not in told[2]["text"]


def test_a_command_that_hangs_or_fails_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A message that waits until its command is let go is told about while the run goes on."""
    said, gate, went_on = engine_messages(), threading.Event(), []

    def held(notifier: Notifier, body: bytes) -> None:
        went_on.append(gate.wait(200))
        command(notifier, body)

    command = Notifier._command
    monkeypatch.setattr(Notifier, "_command", held)
    settings = NotifySettings(command=["/does/not/exist", "TOKEN"], on=["done"])
    notifier = Notifier("f", settings, tmp_path)
    notifier.notify("done", "x")
    notifier.notify("lost", "not asked for")
    gate.set()
    notifier.close()
    assert went_on == [True] and len(said) == 1 and "TOKEN" not in said[0]


@pytest.mark.parametrize(
    "address",
    [
        "http://example.org/hook",
        "http://localhost.example.org/hook",
        "http://127.0.0.1@example.org/hook",
        "http://127.0.0.1.example.org/hook",
        "https:///hook",
        "ftp://localhost/hook",
        "http://[::1",
    ],
)
def test_a_webhook_that_anyone_could_read_is_refused(address: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with pytest.raises(ConfigurationError, match="webhook"):
        NotifySettings(webhook=address)
    (tmp_path / "secret").write_text(address)
    notifier = Notifier("f", NotifySettings(webhook="file:secret"), tmp_path)
    notifier.notify("done", "done")
    notifier.close()
    assert "was not sent: ValueError" in caplog.text and "hook" not in caplog.text


def test_a_webhook_that_leads_elsewhere_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append(self.path)
            self.send_response(302)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        do_POST = do_GET = answer

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/hook"
    notifier = Notifier("f", NotifySettings(webhook=address), tmp_path)
    notifier.notify("done", "done")
    notifier.close()
    server.shutdown()
    assert asked == ["/hook"] and "was not sent: HTTPError" in caplog.text


@pytest.mark.parametrize("ahead", [-3 * 3600.0, 0.0, 3 * 3600.0])
def test_whether_a_run_lives_is_said_by_its_process_and_by_no_clock(tmp_path: Path, ahead: float):
    """A run that was killed passed for one at work for as long as the clock was set back, and one at work for killed
    where it was set forward. That of another host or boot is judged by the time of its snapshot."""
    made, _, _ = recorder(tmp_path)
    made.clock = lambda: time.time() + ahead
    made.write()
    living = read_snapshot(tmp_path)
    assert living is not None and living.alive and not dataclasses.replace(living, ended="done").alive
    end = "made.write(); import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    script = "import sys, time; from pathlib import Path; from tests.engine.test_live import recorder; "
    script += f"made, _, _ = recorder(Path(sys.argv[1])); made.clock = lambda: time.time() + {ahead}; {end}"
    assert subprocess.run([sys.executable, "-c", script, tmp_path]).returncode == -9
    killed = read_snapshot(tmp_path)
    assert killed is not None and killed.process and killed.process != living.process and not killed.alive
    elsewhere = dataclasses.replace(killed, process=f"another-boot{killed.process[12:]}")
    assert elsewhere.alive == dataclasses.replace(killed, process="").alive == (ahead >= 0)


def test_a_run_that_may_not_be_looked_at_is_not_taken_for_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As another account's is, whose workdir is its own."""
    with pytest.raises(InputError, match="no run has begun here"):
        follow_run(tmp_path)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        follow_run(tmp_path)

    def denied(path: Path, *more, **others):
        raise PermissionError(errno.EACCES, "denied", str(path))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(PermissionError):
        follow_run(tmp_path)


def test_a_run_that_was_killed_before_the_clock_was_set_back_is_not_followed_for_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Its last snapshot is of three hours from now; another that renews its own goes on."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        assert clock[0] < 200.0, "followed for ever"
        clock[0] += seconds
        if clock[0] < 90.0:
            made.tick()

    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    ahead = time.time() + 3 * 3600
    made, _, _ = recorder(tmp_path)
    made.clock = lambda: ahead + clock[0]
    made.write()
    assert follow.follow_run(tmp_path) == 0
    assert clock[0] >= 90.0 and "it was killed" in capsys.readouterr().out


@pytest.mark.slow
def test_a_real_run_leaves_every_transition_and_its_end_can_be_followed(tmp_path: Path):
    told = tmp_path / "told"
    command = [sys.executable, "-c", f"import sys; open({str(told)!r}, 'a').write(sys.stdin.read())"]
    long = {"steps": 150}  # seconds, in each of which the stage is asked for
    path = write_federation(
        tmp_path,
        ["a"],
        training=long,
        rounds=1,
        final_evaluation=False,
        progress_seconds=1,
        notify={"command": command},
    )
    process = crossfed("run", "--quiet", "-f", path, folder=tmp_path / "engine")
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    entries = Journal(read_federation(path).archive_path).read()
    kinds = [one.kind for one in entries if one.kind != "stage"]
    assert kinds == [
        "run_started",
        "round_started",
        "started",
        "trained",
        "verified",
        "averaging",
        "averaged",
        "run_ended",
    ]
    stages = [one.detail["stage"] for one in entries if one.kind == "stage"]
    order = iter(("loading", "evaluating", "training", "evaluating", "saving"))  # a short one may not be seen
    assert stages and all(one in order for one in stages), stages
    assert json.loads(told.read_text())["event"] == "done"
    follow = crossfed("status", "--follow", "-f", path, folder=tmp_path / "engine")
    text, _ = follow.communicate(timeout=200)
    assert follow.returncode == 0 and "a: done" in text and "the run has ended" in text, text


def test_progress_json_is_what_the_trainer_writes(tmp_path: Path):
    message = JobProgress(stage="saving", step=4, steps=4, loss=1.5, tokens_per_second=3.0, seconds_left=0.0, time=9.0)
    assert write_progress(tmp_path, message)
    assert read_progress((tmp_path / "progress.json").read_text()) == message


def test_time_left_is_of_steps_like_those_to_come_and_unknown_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A first step that compiles for 50 s said 8 minutes of steps of one second, also where a round goes on."""
    from facility.training.engine import StepResult
    from facility.training.progress import Progress

    now = [1000.0]
    monkeypatch.setattr("facility.training.progress.time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 9.0))
    result = StepResult(loss=1.0, gradient_norm=1.0, predictions=1, rate=1e-3, skipped=False)
    for before in (0, 4):
        shown, found = Progress(tmp_path, steps=10, step_tokens=7, always=False), []
        for step, seconds in ((1, 50.0), (2, 1.0), (3, 1.0), (10 - before, 7.0 - before)):
            now[0] += seconds
            shown.step(before + step, result)
            told = read_progress((tmp_path / "progress.json").read_text())
            found.append((told.step - before, told.tokens_per_second, told.seconds_left))
        assert found == [(1, 0.0, None), (2, 7.0, 8.0 - before), (3, 7.0, 7.0 - before), (10 - before, 7.0, 0.0)]


def test_progress_that_cannot_be_written_is_told_once_and_so_is_its_end(tmp_path: Path, caplog):
    """A trainer's own reports warned at every step; ours stopped after the first failure, and the page with them."""
    from facility.training.engine import StepResult
    from facility.training.progress import Progress

    job = tmp_path / "job"
    shown = Progress(job, steps=6, step_tokens=1, always=False)
    result = StepResult(loss=1.0, gradient_norm=1.0, predictions=1, rate=1e-3, skipped=False)
    for _ in range(3):
        shown.step(6, result)
    assert [one.message.partition("progress.json ")[2][:24] for one in caplog.records] == ["cannot be written: [Errn"]
    job.mkdir()
    for _ in range(2):
        shown.step(6, result)
    assert [one.message for one in caplog.records[1:]] == [f"{job / 'progress.json'} can be written again"]
    assert read_progress((job / "progress.json").read_text()).step == 6


def test_a_trainer_of_ones_own_is_warned_once_of_progress_that_cannot_be_written(tmp_path: Path, caplog, monkeypatch):
    from facility.contract import Call

    place = tmp_path / "gone"
    place.mkdir()
    monkeypatch.chdir(place)
    settings: Any = SimpleNamespace(rounds=1, training=SimpleNamespace(steps=3))
    base: Any = None
    of = {"model": tmp_path, "dataset": tmp_path, "out": tmp_path, "state": tmp_path}
    call = Call(**of, base=base, settings=settings, round=0, signals=[])
    place.rmdir()
    for step in (1, 2, 3):
        call.report_step(step, 1.0)
    assert len(caplog.records) == 1 and "progress.json cannot be written" in caplog.records[0].message
