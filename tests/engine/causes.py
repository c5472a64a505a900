"""Causes of failure, one after the other on one federation of one facility, and what the console says of each.

Every cause is undone before the next, so that each start also shows that the cause before it has left nothing behind.
Where the second and last round was completed all the same, the weights are compared with those of an undisturbed
federation, and the next cause begins again after the first round. The last start, whose engine is killed, goes to the
end by itself.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.engine.engines import crossfed, weights
from tests.engine.harms import Act, Harm, altered, cut, flipped, full, killed_engine, occupied, read_only
from tests.federations import write_federation

LIMIT_SECONDS = 30.0
STUCK_SECONDS = 150.0
"""After the cause, when nothing is said or the run does not end."""
WHOLE_SECONDS = 900.0
"""Of a run that goes to its end."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One fault, and what the console must say of it."""

    name: str
    harm: Harm
    says: str
    """Pattern of the sentence."""
    moment: str = ""
    """What StreamFlow's log says as the cause appears; empty: it is there before the command is given."""
    mounts: bool = False
    """Needs root."""
    stops: bool = True
    """False: the run goes on all the same."""


ARCHIVED, WORK, STATE, DATA = "archive/round-0000", "work", "sites/a/.crossfed", "sites/a/dataset"
KEPT = f"{STATE}/pico/a/round-0"
SEND, TRAIN, RECEIVE = (f"EXECUTING step /rounds/{step}_a " for step in ("send", "train", "receive"))
AGGREGATE, REPORT = "EXECUTING step /rounds/aggregate ", "EXECUTING step /report "
READ_ONLY, FULL = r"\S* (is mounted read-only|cannot be written)", r"\S* is full"
NO_ROOM = r"( is full|, the run needs up to)"
"""Said before a run begins, which knows how much it will need."""


def damaged(name: str, pattern: str, change=flipped, *, says: str, moment: str = "") -> Cause:
    return Cause(name=name, harm=altered(pattern, change), says=says, moment=moment)


def mounted(name: str, harm: Harm, says: str, moment: str = "") -> Cause:
    return Cause(name=name, harm=harm, says=says, moment=moment, mounts=True)


BEFORE = [
    damaged("archived model, one bit", f"{ARCHIVED}/model/*.safetensors", says=r"model\.safetensors.*rewind --to 0"),
    damaged("float32 master, one bit", f"{ARCHIVED}/state/master/*.safetensors", says=r"master.*rewind --to 0"),
    damaged(
        "server optimizer's tensor, one bit", f"{ARCHIVED}/state/second*/*.safetensors", says=r"second.*rewind --to 0"
    ),
    damaged("archived model's manifest, cut", f"{ARCHIVED}/model/manifest.json", cut, says=r"manifest\.json.*rewind"),
    damaged("archived state's manifest, cut", f"{ARCHIVED}/state/manifest.json", cut, says=r"manifest\.json.*rewind"),
    damaged("round file, cut", f"{ARCHIVED}/round.json", cut, says=r"round-0000/round\.json cannot be read.*rewind"),
    damaged("initial model, one bit", "archive/initial/model/*.safetensors", says=r"initial/model/model\.safetensors"),
    damaged("archived settings, cut", "archive/federation.json", cut, says=r"federation\.json cannot be read"),
    damaged("note of the round under way, cut", "archive/under_way.json", cut, says=r"under_way\.json cannot be read"),
    Cause(name="StreamFlow's directory is a file", harm=occupied("work/engine"), says=r"work/engine,"),
    mounted("archive read-only", read_only("archive"), f"archive{READ_ONLY}"),
    mounted("work directory read-only", read_only(WORK), f"work{READ_ONLY}"),
    mounted("archive full", full("archive"), f"archive{NO_ROOM}"),
    mounted("work directory full", full(WORK), f"work{NO_ROOM}"),
]
SENDING = [
    mounted("work directory full as a model is sent", full(WORK), f"work{FULL}", SEND),
    mounted("coordinator's directory read-only as a model is sent", read_only("work/coordinator"), READ_ONLY, SEND),
]
TRAINING = [
    damaged("dataset, one bit", f"{DATA}/train.npy", says=r"train\.npy .*altered", moment=TRAIN),
    damaged("dataset's manifest, cut", f"{DATA}/dataset.json", cut, says=r"dataset\.json", moment=TRAIN),
    damaged(
        "facility's optimizer, one bit", f"{KEPT}/model.safetensors", says=r"safetensors was altered", moment=TRAIN
    ),
    damaged("facility's position in its data, cut", f"{KEPT}/state.json", cut, says="state.json was alt", moment=TRAIN),
    damaged("facility's digests, cut", f"{KEPT}/seal.json", cut, says=r"seal\.json cannot be read", moment=TRAIN),
    mounted("facility's state read-only", read_only(STATE), rf"\.crossfed{READ_ONLY}", TRAIN),
    mounted("facility's state full", full(STATE), rf"\.crossfed{FULL}", TRAIN),
    mounted("job's directory read-only", read_only("work/a"), rf"work/a{READ_ONLY}", TRAIN),
    mounted("work directory full as a job trains", full(WORK), f"work{FULL}", TRAIN),
    mounted("archive full as a job trains", full("archive"), f"archive{FULL}", TRAIN),
]
RECEIVING = [
    mounted("work directory full as an update is received", full(WORK), f"work{FULL}", RECEIVE),
    mounted(
        "coordinator's directory read-only as an update is received", read_only("work/coordinator"), READ_ONLY, RECEIVE
    ),
]
AVERAGING = [
    mounted("archive full at aggregation", full("archive"), f"archive{FULL}", AGGREGATE),
    mounted("archive read-only at aggregation", read_only("archive"), f"archive{READ_ONLY}", AGGREGATE),
    mounted("work directory full at aggregation", full(WORK), f"work{FULL}", AGGREGATE),
]
KILLED = Cause(
    name="engine killed", harm=killed_engine, says=r"ended with code -9; starting again", moment=TRAIN, stops=False
)
REPORTING = Cause(
    name="report page cannot be written",
    harm=occupied("archive/report.html", by_directory=True),
    says=r"the report page cannot be written .* `crossfed report`",
    moment=REPORT,
    stops=False,
)
STEPS = {"start": BEFORE, "send": SENDING, "train": TRAINING, "receive": RECEIVING, "aggregate": AVERAGING}
"""Causes by the step as which they appear."""


def begun(folder: Path) -> Path:
    """federation.yml of one facility, with one round done and a second wanted."""
    path = write_federation(
        folder / "root",
        ["a"],
        rounds=1,
        final_evaluation=False,
        sending={"encoding": "delta-int8"},
        aggregation={"rule": "fedadam"},
    )
    finish(path)
    described = yaml.safe_load(path.read_text())
    path.write_text(yaml.safe_dump(described | {"rounds": 2}, sort_keys=False))
    return path


def copied(path: Path, folder: Path) -> Path:
    """The whole federation in another place; its federation.yml."""
    shutil.copytree(path.parent.parent, folder / "root", symlinks=True)
    return folder / "root" / "workflow" / "federation.yml"


def command(path: Path) -> subprocess.Popen[str]:
    folder = path.parent.parent.parent / "machine"
    folder.mkdir(exist_ok=True)
    return crossfed("run", "--quiet", "--accept", "-f", path, folder=folder)


def finish(path: Path) -> list[str]:
    """Run to the end; the digests of all rounds' models."""
    said, _ = (process := command(path)).communicate(timeout=900)
    assert process.returncode == 0, said[-4000:]
    return weights(path)


@dataclass(kw_only=True)
class Watched:
    """A run of `crossfed`, its console and StreamFlow's log."""

    path: Path
    moment: str
    act: Act
    says: str
    patience: float = STUCK_SECONDS
    lines: list[str] = field(default_factory=list)
    appeared: float = 0.0
    appeared_after: float = 0.0
    """Seconds from the command to the cause."""
    said: float = -1.0
    """Seconds from the cause to the sentence; -1: it was not said."""
    ended: float = -1.0
    """Seconds from the cause to the end of the command."""
    sentence: str = ""
    code: int = 0

    def run(self) -> Watched:
        """Make the cause at its moment, and watch to the end of the command."""
        log = self.path.parent.parent / "work" / "streamflow.log"
        before = log.stat().st_size if log.exists() else 0
        if not self.moment:
            self.act()
        process, began = command(self.path), time.monotonic()
        self.appeared = began if not self.moment else 0.0
        reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        reader.start()
        while process.poll() is None:
            if not self.appeared and self.moment in _text(log, before):
                self.act()
                self.appeared, self.appeared_after = (now := time.monotonic()), now - began
            self._look()
            if time.monotonic() - (self.appeared or began + STUCK_SECONDS) > self.patience:
                os.killpg(process.pid, signal.SIGTERM if self.said >= 0 else signal.SIGKILL)
                time.sleep(2)
            time.sleep(0.05)
        self.ended = time.monotonic() - (self.appeared or began)
        reader.join(10)
        self._look()
        self.code = process.returncode
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.lines.extend(process.stdout)

    def _look(self) -> None:
        if self.said >= 0 or not self.appeared:
            return
        flat = " ".join("".join(self.lines).split())  # the console wraps long sentences
        if re.search(self.says, flat):
            self.said, self.sentence = time.monotonic() - self.appeared, _sentence(self.lines, self.says)


def _sentence(lines: Sequence[str], says: str) -> str:
    """The lines of the console, one or several wrapped, that match."""
    for count in (1, 2, 3, 4):
        for first in range(len(lines)):
            told = " ".join("".join(lines[first : first + count]).split())
            if re.search(says, told):
                return re.sub(r"^(\d\d:\d\d:\d\d|error:) ", "", told)
    return ""


def _text(log: Path, before: int) -> str:
    try:
        with open(log, "rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cause as it was measured."""

    cause: str
    step: str
    seconds: float
    """From the cause to the sentence; -1: it was not said."""
    ended: float
    """From the cause to the end of the command."""
    sentence: str
    text: str
    """The console's end."""
    right_code: bool

    def wrong(self, allowance: float) -> str:
        """What does not hold, or ''. `allowance`: what is added to `LIMIT_SECONDS`."""
        if 0 <= self.seconds <= LIMIT_SECONDS + allowance and self.right_code:
            return ""
        return f"{self.cause}: said after {self.seconds:.0f} s, ended after {self.ended:.0f} s:\n{self.text}"


def measure(path: Path, cause: Cause, step: str = "") -> Row:
    """Make one cause, run, and undo it."""
    root = path.parent.parent
    with cause.harm(root) as act:
        patience = STUCK_SECONDS if cause.stops else WHOLE_SECONDS
        found = Watched(path=path, moment=cause.moment, act=act, says=cause.says, patience=patience).run()
    return Row(
        cause=cause.name,
        step=step,
        seconds=round(found.said, 1),
        ended=round(found.ended, 1),
        sentence=found.sentence.replace(f"{root}/", ""),
        text="".join(found.lines)[-3000:],
        right_code=found.code > 0 if cause.stops else found.code == 0,
    )


@dataclass(kw_only=True)
class Measured:
    """All causes of one machine."""

    rows: list[Row] = field(default_factory=list)
    start_seconds: float = 0.0
    """From the command to the first step of an undisturbed run."""
    load: float = 0.0
    """Mean of the machine's load beside its cores, at least 1."""
    same: bool = True
    """Whether the disturbed federation ended with the weights of the undisturbed one, each time that it ended."""

    def wrong(self) -> list[str]:
        """What does not hold. What is there before the command may take the engine's start longer to be told; a busy
        machine, as many times longer as it has more to do than cores."""
        found = []
        for row in self.rows:
            allowance = LIMIT_SECONDS * (self.load - 1) + (self.start_seconds if row.step == "start" else 0.0)
            found += [text] if (text := row.wrong(allowance)) else []
        return found + ([] if self.same else ["the weights are not those of the undisturbed run"])


def measure_all(folder: Path, only: str = "") -> Measured:
    """Every cause whose name matches `only`, then the last start, whose engine is killed too, and its weights."""
    path = begun(folder / "begun")
    undisturbed = copied(path, folder / "undisturbed")
    healthy = Watched(path=undisturbed, moment="EXECUTING step /start ", act=lambda: None, says="")
    healthy.patience = WHOLE_SECONDS
    healthy.run()
    disturbed, measured = copied(path, folder / "disturbed"), Measured(start_seconds=round(healthy.appeared_after, 1))
    loads = [os.getloadavg()[0]]
    chosen = [(step, cause) for step, causes in STEPS.items() for cause in causes if re.search(only, cause.name)]
    right = weights(undisturbed)
    for step, cause in [*chosen, ("train", KILLED), ("report", REPORTING)]:
        if os.geteuid() == 0 or not cause.mounts:
            measured.rows.append(measure(disturbed, cause, step))
            loads.append(os.getloadavg()[0])
        found = weights(disturbed)
        if cause in (KILLED, REPORTING) or len(found) == len(right):
            measured.same &= found == right
        if cause.stops and len(found) == len(right):  # it was told after the round was complete
            shutil.rmtree(disturbed.parent.parent)
            disturbed = copied(path, folder / "disturbed")
    measured.load = max(1.0, sum(loads) / len(loads) / (os.cpu_count() or 1))
    return measured
