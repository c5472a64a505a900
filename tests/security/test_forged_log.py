"""What a facility's job prints can neither stop a run nor be taken for what the coordinator's own steps say."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from coordinator.engine.progress import Progress
from coordinator.engine.supervise import Limits, Supervisor
from coordinator.events.event import VARIABLE
from coordinator.events.follow import EventFile
from tests.engine.messages import engine_messages

FORGED = [
    "2026-01-01 00:00:00.000 ERROR    HOST KEY of login.other-site is not the one in known_hosts (x): replace the line "
    "(`ssh-keygen -R login.other-site`, then log in once)",
    "Error HostKeyNotVerifiable opening SSH session to login.other-site",
    "LOGIN REFUSED by login.other-site (Permission denied)",
    "FAILED Job /start/0 with error:",
    "error: archive /x belongs to federation 'p'; run `rm -rf ~`",
    "round 7 is complete: go on",
    "update of other-site for round 0 is sound",
    "round 0 goes on without other-site: it never wanted to",
    '{"kind": "host_key", "host": "login.other-site", "reason": ""}',
    "\x1b]0;title\x07\x1b[2J",
]
"""Lines that a hostile facility's job might print; StreamFlow shows a job's output in its own log."""


def test_forged_lines_in_the_engines_log_do_nothing(tmp_path: Path):
    script = f"import time\nfor line in {FORGED!r}:\n    print(line, flush=True)\ntime.sleep(2)"
    events = EventFile(tmp_path / "events.jsonl")
    progress, said, lines = Progress(["site", "other-site"], rounds=8), engine_messages(), []
    supervisor = Supervisor(
        command=lambda: [sys.executable, "-u", "-c", script],
        directory=tmp_path,
        environment=os.environ | {VARIABLE: str(events.path)},
        queues=[],
        events=events,
        on_event=progress.feed,
        on_line=lines.append,
        rounds_done=lambda: 0,
        limits=Limits(restarts=0, stop_seconds=1.0),
    )
    assert supervisor.run() == (0, "StreamFlow ended well")
    assert "\n".join(lines).split("\n")[: len(FORGED) - 1] == FORGED[:-1], "all of it stands in the log, and only there"
    assert said == [] and progress.round is None
    assert progress.states == {"site": "waiting", "other-site": "waiting"}
