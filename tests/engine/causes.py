"""Causes of failure on a real federation of one facility: what the console says of each, and what follows its end.

Every cause has a copy of one federation to itself, in which the first of two rounds is done. It is made, the run is
watched to its end, the cause is undone, and the same command is given again: it must then end well, with the weights of
a federation that nothing disturbed and with its report.
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
from tests.engine.noise import noise
from tests.federations import write_federation

LIMIT_SECONDS = 30.0
STUCK_SECONDS = 150.0
"""After the cause, when nothing is said or the run does not end."""
WRAPPED = 60
"""Characters that a line has at least which the console has broken off."""
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
STEPS = {
    "start": BEFORE,
    "send": SENDING,
    "train": [*TRAINING, KILLED],
    "receive": RECEIVING,
    "aggregate": AVERAGING,
    "report": [REPORTING],
}
"""Causes by the step as which they appear."""
ALL = [(step, cause) for step, causes in STEPS.items() for cause in causes]


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
        self.code, self.sentence = process.returncode, _sentence(self.lines, self.says) if self.said >= 0 else ""
        return self

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        self.lines.extend(process.stdout)

    def _look(self) -> None:
        if self.said >= 0 or not self.appeared:
            return
        flat = " ".join("".join(self.lines).split())  # the console wraps long sentences
        if re.search(self.says, flat):
            self.said = time.monotonic() - self.appeared


ANEW = re.compile(r"\d\d:\d\d:\d\d |error: |the run ended|The archive holds|rounds and facilities|[^\x00-\u24ff]|\s|$")
"""How a line of the console begins that does not go on with a long sentence."""


def _sentence(lines: Sequence[str], says: str) -> str:
    """The lines of the console, one or several wrapped, that match, with the whole sentence."""
    for count in (1, 2, 3, 4):
        for first in range(len(lines)):
            end = first + count
            if re.search(says, " ".join("".join(lines[first:end]).split())):
                while first and not ANEW.match(lines[first]):
                    first -= 1
                while end < len(lines) and len(lines[end - 1]) > WRAPPED and not ANEW.match(lines[end]):
                    end += 1
                told = " ".join("".join(lines[first:end]).split())
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
    right_code: bool
    recovered: bool
    """Once the cause was gone, the same command ended well, with the right weights and a report."""
    load: float
    """Runnable tasks per core around the measurement, at least 1."""
    text: str
    """The console's end, of both commands."""
    noise: tuple[str, ...] = ()
    """Lines of the console that are the engine's own, or tell the stop again."""

    def wrong(self, start_seconds: float) -> str:
        """What does not hold, or ''. A cause that is there before the command may take the engine's start longer to be
        reported; on a busy machine, as many times longer as it has more to do than cores."""
        limit = LIMIT_SECONDS * self.load + (start_seconds if self.step == "start" else 0.0)
        told = f"{self.cause}: said after {self.seconds:.0f} s, ended after {self.ended:.0f} s:\n{self.text}"
        if not (0 <= self.seconds <= limit and self.right_code):
            return told
        if self.noise:
            return f"noise on the console: {self.noise}: {told}"
        return "" if self.recovered else f"does not recover: {told}"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What every cause begins with."""

    folder: Path
    begun: Path
    """federation.yml of the federation with one of two rounds done."""
    right: list[str]
    """Digests of the models of both rounds, undisturbed."""
    start_seconds: float
    """From the command to the first step of an undisturbed run."""


def prepare(folder: Path) -> Prepared:
    """Begin a federation, and complete a copy of it undisturbed."""
    path = begun(folder / "begun")
    undisturbed = copied(path, folder / "undisturbed")
    healthy = Watched(path=undisturbed, moment="EXECUTING step /start ", act=lambda: None, says="")
    healthy.patience = WHOLE_SECONDS
    healthy.run()
    assert healthy.code == 0, "".join(healthy.lines)
    right, start = weights(undisturbed), round(healthy.appeared_after, 1)
    return Prepared(folder=folder, begun=path, right=right, start_seconds=start)


def measure(prepared: Prepared, cause: Cause, step: str) -> Row:
    """Make one cause on a copy of the federation, run, undo it, and give the same command again."""
    place, loads = prepared.folder / "disturbed", [os.getloadavg()[0]]
    path = copied(prepared.begun, place)
    root = path.parent.parent
    with cause.harm(root) as act:
        patience = STUCK_SECONDS if cause.stops else WHOLE_SECONDS
        found = Watched(path=path, moment=cause.moment, act=act, says=cause.says, patience=patience).run()
    said, recovered = recovery(path, prepared.right)
    loads.append(os.getloadavg()[0])
    shutil.rmtree(place)
    return Row(
        cause=cause.name,
        step=step,
        seconds=round(found.said, 1),
        ended=round(found.ended, 1),
        sentence=found.sentence.replace(f"{root}/", ""),
        right_code=found.code > 0 if cause.stops else found.code == 0,
        recovered=recovered,
        load=round(max(1.0, sum(loads) / len(loads) / (os.cpu_count() or 1)), 1),
        text="".join(found.lines)[-3000:] + "--- again:\n" + said[-3000:],
        noise=tuple(noise(found.lines)),
    )


def recovery(path: Path, right: list[str]) -> tuple[str, bool]:
    """What the same command says, and whether it leaves the right weights and the report."""
    process = command(path)
    try:
        said, _ = process.communicate(timeout=WHOLE_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], False
    whole = process.returncode == 0 and (path.parent.parent / "archive" / "report.html").is_file()
    return said, whole and weights(path) == right
