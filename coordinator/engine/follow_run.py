"""`crossfed status --follow`: what a run that goes on in another process shows, from the snapshot that it leaves."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from rich.live import Live

from coordinator.console import command_console
from coordinator.engine.live import FILE, STALE_SECONDS, Snapshot, live_lines, live_table, read_snapshot
from coordinator.shown_text import safe_line
from facility.exchange.errors import InputError

LOOK_SECONDS = 1.0
LINE_SECONDS = 30.0
"""Between two groups of lines where there is no terminal."""


def follow_run(workdir: Path, *, as_json: bool = False) -> int:
    """Show the run until it ends; returns 0. Raises `InputError` where there has never been one."""
    snapshot = read_snapshot(workdir)
    if snapshot is None:
        try:
            (workdir / FILE).read_bytes()  # raises where it is there and may not be read
        except FileNotFoundError:
            raise InputError(
                f"there is no {workdir / FILE}: no run has begun here; `crossfed run` begins one"
            ) from None
        raise InputError(f"{workdir / FILE} is damaged; a run that goes on writes it again")
    console, renewed = command_console(160), Renewed()
    if as_json:
        print(json.dumps(dataclasses.asdict(snapshot)))
        return 0
    if console.is_terminal:
        with Live(live_table(snapshot), console=console, refresh_per_second=2) as live:
            while renewed(snapshot):
                time.sleep(LOOK_SECONDS)
                snapshot = read_snapshot(workdir) or snapshot
                live.update(live_table(snapshot))
    else:
        last = 0.0
        while True:
            goes_on = renewed(snapshot)
            if not goes_on or time.monotonic() - last >= LINE_SECONDS:
                last = time.monotonic()
                print("\n".join(live_lines(snapshot)), flush=True)
            if not goes_on:
                break
            time.sleep(LOOK_SECONDS)
            snapshot = read_snapshot(workdir) or snapshot
    console.print(f"the run has ended: {safe_line(snapshot.ended or 'it was killed')}", markup=False)
    return 0


class Renewed:
    """Tells of each snapshot that is shown whether its run is still alive. One that no new snapshot follows for
    `STALE_SECONDS` of this process is not, whatever its time: after a clock was set back, a killed run's lies ahead."""

    def __init__(self) -> None:
        self._time, self._since = 0.0, 0.0

    def __call__(self, snapshot: Snapshot) -> bool:
        if snapshot.time != self._time:
            self._time, self._since = snapshot.time, time.monotonic()
        return snapshot.alive and time.monotonic() - self._since < STALE_SECONDS
