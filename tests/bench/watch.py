"""Looks at an engine's processes, and at the disk below a folder, while a benchmark runs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

COUNTERS = ("rchar", "wchar")
"""Of /proc/PID/io: bytes through read and write calls, page cache or not."""


@dataclass
class Seen:
    """One process, as it was seen last."""

    kind: str
    began: float
    ended: float
    memory: int = 0
    """Largest resident set."""
    io: dict[str, int] = field(default_factory=dict)


@dataclass
class Watch:
    """Looks at the engine's processes and at the folder until the engine ends."""

    pid: int
    root: Path
    sshd: int | None = None
    """Of the server that facilities are reached by; what runs below it is of kind `facility: ...`."""
    processes: dict[int, Seen] = field(default_factory=dict)
    disk: int = 0

    def run(self, over: threading.Event) -> None:
        looked = 0.0
        while not over.wait(0.1):
            now = time.monotonic()
            for pid, kind in self.kinds():
                size = highest(pid)
                if not size:
                    continue
                seen = self.processes.setdefault(pid, Seen(kind=kind, began=now, ended=now))
                seen.kind, seen.ended = kind, now
                seen.memory, seen.io = max(seen.memory, size), counters(pid) or seen.io
            if now - looked > 2:
                self.disk, looked = max(self.disk, used(self.root)), now

    def kinds(self) -> Iterator[tuple[int, str]]:
        """Process and kind of all that run now."""
        for pid, parent in descendants(self.pid):
            yield pid, kind_of(pid, parent, self.pid)
        for pid, parent in descendants(self.sshd) if self.sshd else ():
            yield pid, f"facility: {kind_of(pid, parent, self.pid)}"

    def memory(self) -> dict[str, int]:
        """Largest resident set by kind of process."""
        found: dict[str, int] = {}
        for seen in self.processes.values():
            found[seen.kind] = max(found.get(seen.kind, 0), seen.memory)
        return found

    def by_kind(self) -> dict[str, dict[str, float]]:
        """How many processes of each kind there were, their seconds, and gigabytes read and written by calls."""
        found: dict[str, dict[str, float]] = {}
        for seen in self.processes.values():
            entry = found.setdefault(seen.kind, {"processes": 0, "seconds": 0.0, "read_gb": 0.0, "written_gb": 0.0})
            entry["processes"] += 1
            entry["seconds"] += seen.ended - seen.began
            entry["read_gb"] += seen.io.get("rchar", 0) / 1e9
            entry["written_gb"] += seen.io.get("wchar", 0) / 1e9
        return {kind: {k: round(v, 3) for k, v in entry.items()} for kind, entry in sorted(found.items())}


def counters(pid: int) -> dict[str, int]:
    """What a process has read and written so far; empty: it is gone."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return {}
    return {key: int(value) for key, value in (line.split(": ") for line in lines) if key in COUNTERS}


def descendants(pid: int) -> list[tuple[int, int]]:
    """(process, parent) of a process and all below it."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            rest = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(rest[1]), []).append(int(stat.parent.name))
    found, reached = [(pid, 0)], [pid]
    while reached:
        parent = reached.pop()
        for child in parents.get(parent, []):
            found.append((child, parent))
            reached.append(child)
    return found


def kind_of(pid: int, parent: int, engine: int) -> str:
    """`engine`, a step's name, `steps` (the process they are forked from), or `trainer`."""
    if pid == engine:
        return "engine"
    try:
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "others"
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    if module.endswith("step_server"):
        return "steps" if name == "crossfed-steps" else name
    if module in ("facility.train", "tests.bench.perturbing_trainer"):
        return "trainer"
    return module.rpartition(".")[2] or "others"


def highest(pid: int) -> int:
    """The largest resident set of a process so far, in bytes."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def used(root: Path) -> int:
    """Bytes of disk below a folder, each file once however many names it has."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, files in os.walk(root):
        for name in files:
            try:
                found = os.lstat(f"{folder}/{name}")
            except OSError:
                continue
            seen[(found.st_dev, found.st_ino)] = found.st_blocks * 512
    return sum(seen.values())
