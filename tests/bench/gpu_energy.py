"""Energy that jobs report beside the integral of the power that `nvidia-smi` reports over the same time."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from coordinator.archive.journal import Entry

COMMAND = ["nvidia-smi", "--query-gpu=power.draw", "--format=csv,noheader,nounits", "--id=0", "--loop-ms=250"]
Sample = tuple[float, float]
"""Seconds since 1970, watts."""


def joules(samples: Sequence[Sample], begin: float, end: float) -> float | None:
    """Trapezoids between samples, power at both edges by interpolation; None where samples do not span the time."""
    if len(samples) < 2 or samples[0][0] > begin or samples[-1][0] < end:
        return None
    total = 0.0
    for (t0, p0), (t1, p1) in zip(samples, samples[1:], strict=False):
        low, high = max(t0, begin), min(t1, end)
        if high > low:
            slope = (p1 - p0) / (t1 - t0)
            total += (high - low) * (p0 + slope * ((low + high) / 2 - t0))
    return total


class PowerLog:
    """Reads the first GPU's power four times a second while it is open; without `nvidia-smi` it stays empty."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> PowerLog:
        if shutil.which(COMMAND[0]):
            self.process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self.reader = threading.Thread(target=self._read, daemon=True)
            self.reader.start()
        return self

    def _read(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):
                self.samples.append((time.time(), float(line)))

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self.process is not None:
            time.sleep(0.6)  # one sample after the last job
            self.process.terminate()
            self.process.wait()
            self.reader.join()


def energies(
    rounds: Iterable[dict[str, Any]], events: Sequence[Entry], samples: Sequence[Sample]
) -> list[dict[str, Any]]:
    """Of every job: what its report says, and what the power's integral says over the same seconds.

    `rounds`: of `coordinator.archive.summary`. A job ends when its `trained` event says so.
    """
    ended = {(one.round, one.facility): one.time for one in events if one.kind == "trained"}
    found = []
    for one in rounds:
        for row in one["facilities"]:
            used = row.get("usage") or {}
            told = {"round": one["round"], "facility": row["facility"], "joules": used.get("energy_joules")}
            told |= {"source": used.get("energy_source", ""), "seconds": used.get("node_seconds")}
            end = ended.get((one["round"], row["facility"]))
            if end is not None and told["seconds"]:
                told["power_integral_joules"] = joules(samples, end - told["seconds"], end)
            found.append(told)
    return found
