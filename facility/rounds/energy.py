"""Energy counters of a job's nodes, read at its start and at its end and never in between.

`sacct` (https://slurm.schedmd.com/sacct.html, ConsumedEnergyRaw) counts the job; HPE Cray EX's pm_counters the node;
NVML (nvmlDeviceGetTotalEnergyConsumption) the GPUs; RAPL (Linux powercap) the processors.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from facility.exchange.messages.ahead import BEGAN
from facility.exchange.messages.plausible import MOST_JOULES
from facility.exchange.messages.usage import SOURCES, Usage
from facility.launching.devices import listed_devices
from facility.launching.notes import Notes
from facility.launching.place import Tasks

PM_COUNTER = Path("/sys/cray/pm_counters/energy")
RAPL = Path("/sys/class/powercap")
MOST_WATTS = 600.0
"""Of one processor package: RAPL's counter may wrap more than once in a job that is long enough."""
OTHERS_SECONDS = 15.0
"""How long the first task waits for the other nodes' readings."""
LOOK_SECONDS = 0.5
"""How often it looks for them."""
SACCT_SECONDS = 20
"""A slurmdbd that does not answer costs a job so much, and the figure."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The counters of one node at one moment, joules by source and counter."""

    time: float
    counters: Mapping[str, Mapping[str, float]]
    ranges: Mapping[str, float] = field(default_factory=dict)
    """Joules at which a RAPL counter wraps around."""


def read_counters(*, job: str, whole_job: bool) -> Reading:
    """Every counter that answers here; `whole_job`: also ask Slurm for the job `job`."""
    ranges: dict[str, float] = {}
    found = {
        "sacct": _sacct(job) if whole_job and job else {},
        "pm_counters": _pm_counters(),
        "nvml": _nvml(),
        "rapl": _rapl(ranges),
    }
    return Reading(time=time.time(), counters={name: one for name, one in found.items() if one}, ranges=ranges)


def gained(begin: Reading, end: Reading) -> dict[str, float]:
    """Joules by source between two readings; a source that cannot be trusted to have been read right is left out."""
    result = {}
    for source in SOURCES:
        before, after = begin.counters.get(source, {}), end.counters.get(source, {})
        if source == "sacct" and after:
            total: float | None = sum(after.values()) - sum(before.values())
        elif not before or set(before) != set(after):
            continue
        else:
            parts = [_difference(name, before[name], after[name], begin, end) for name in before]
            total = None if None in parts else sum(part for part in parts if part is not None)
        if total is not None and 0 < total < MOST_JOULES:
            result[source] = total
    return result


def _difference(name: str, before: float, after: float, begin: Reading, end: Reading) -> float | None:
    """One counter's gain; None where it may have wrapped an unknown number of times."""
    span = begin.ranges.get(name)
    if span is None:
        return after - before
    if (end.time - begin.time) * MOST_WATTS >= span:
        return None
    return after - before if after >= before else after + span - before


class Meter:
    """Reads this node's counters when it is made, and again when asked what the job used."""

    def __init__(self, tasks: Tasks, environ: Mapping[str, str] = os.environ) -> None:
        self.tasks, self.job = tasks, environ.get("SLURM_JOB_ID", "")
        self.speaks = tasks.local_task == 0
        began = environ.get("SLURM_JOB_START_TIME") or environ.get(BEGAN, "")
        self.before = tasks.elapsed(time.time(), _number(began) or 0.0)
        self.made = time.monotonic()  # from now on no clock that is set counts
        self.first = self._read()
        given, seen = tasks.devices_per_node or tasks.devices_here, len(self.first.counters.get("nvml", {}))
        self.own_alone = tasks.local_tasks > 1 and 0 < seen < (given or tasks.local_tasks)
        """True if each task sees its own GPUs alone: then this one cannot speak for those of the node."""
        self.gpus = given or (tasks.local_tasks if self.own_alone else seen)
        """GPUs of this node that the job uses."""

    def note(self, notes: Notes) -> None:
        """Leave this node's gain for the first task."""
        if self.speaks and not self.tasks.first:
            notes.write(f"energy-{self.tasks.node}", self._gained())

    def usage(self, notes: Notes) -> Usage:
        """What the whole job used; the first task asks. Waits `OTHERS_SECONDS` at most for the other nodes."""
        here = self._gained()
        others = self._others(notes)
        nodes = max(1, self.tasks.nodes)
        seconds = self.before + time.monotonic() - self.made
        energy, source = combined(here, others, nodes)
        return Usage(
            node_seconds=round(nodes * seconds, 3),
            nodes=nodes,
            gpu_seconds=round(self.gpus * nodes * seconds, 3),
            energy_joules=energy,
            energy_source=source,
        )

    def _read(self) -> Reading:
        return read_counters(job=self.job, whole_job=self.tasks.first) if self.speaks else Reading(time=0, counters={})

    def _gained(self) -> dict[str, float]:
        found = gained(self.first, self._read())
        return {source: joules for source, joules in found.items() if source != "nvml" or not self.own_alone}

    def _others(self, notes: Notes) -> list[dict[str, Any]]:
        wanted = [number for number in range(max(1, self.tasks.nodes)) if number != self.tasks.node]
        deadline = time.monotonic() + OTHERS_SECONDS
        while True:
            left = notes.read_all([f"energy-{number}" for number in wanted])
            found = [note for note in left if isinstance(note, dict)]
            if len(found) == len(wanted) or time.monotonic() > deadline:
                return found
            time.sleep(LOOK_SECONDS)


def combined(here: Mapping[str, float], others: Sequence[Mapping[str, float]], nodes: int) -> tuple[float | None, str]:
    """Joules of the job and their source: the first that counts the job, or that every node has."""
    for source in SOURCES:
        if source == "sacct" and source in here:
            return round(here[source], 3), source
        if source in here and len(others) == nodes - 1 and all(source in one for one in others):
            return round(here[source] + sum(one[source] for one in others), 3), source
    return None, ""


def _sacct(job: str) -> dict[str, float]:
    """The largest figure of the job and its steps, which are parts of it."""
    words = ["sacct", "-j", job, "-n", "-P", "-o", "ConsumedEnergyRaw"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=SACCT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    known = [value for line in said.stdout.split() if 0 < (value := _number(line)) < MOST_JOULES]
    return {"job": max(known)} if said.returncode == 0 and known else {}


def _pm_counters(path: Path | None = None) -> dict[str, float]:
    """`12345 J 1700000000 us`, of `PM_COUNTER` by default."""
    try:
        return {"node": float((path or PM_COUNTER).read_text(encoding="utf-8").split()[0])}
    except (OSError, ValueError, IndexError):
        return {}


def _rapl(ranges: dict[str, float], place: Path | None = None) -> dict[str, float]:
    """Packages alone: cores and memory controllers below them are parts of them, as they are of `psys`, the platform
    that some machines list beside them. Often readable by root only."""
    found = {}
    for folder in sorted((place or RAPL).glob("intel-rapl:[0-9]*")):
        if folder.name.count(":") == 1:
            try:
                if (folder / "name").read_text(encoding="utf-8").strip() == "psys":
                    continue
                found[folder.name] = float((folder / "energy_uj").read_text(encoding="utf-8")) / 1e6
                ranges[folder.name] = float((folder / "max_energy_range_uj").read_text(encoding="utf-8")) / 1e6
            except (OSError, ValueError):
                return {}
    return found


def _nvml() -> dict[str, float]:
    """Joules by GPU that this job sees (CUDA_VISIBLE_DEVICES), since the driver was loaded."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    if library.nvmlInit_v2():
        return {}
    try:
        return {name: joules for name, handle in _handles(library) if (joules := _joules(library, handle)) is not None}
    finally:
        library.nvmlShutdown()


def _handles(library: Any) -> list[tuple[str, ctypes.c_void_p]]:
    said = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = listed_devices(said or "")
    count = ctypes.c_uint()
    if said is None and library.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
        visible = [str(number) for number in range(count.value)]
    found = []
    for name in visible:
        handle = ctypes.c_void_p()
        code = (
            library.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
            if name.isdigit()
            else library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        )
        if code == 0:
            found.append((name, handle))
    return found


def _joules(library: Any, handle: ctypes.c_void_p) -> float | None:
    millijoules = ctypes.c_ulonglong()
    code = library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules))
    return millijoules.value / 1000 if code == 0 else None


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
