"""The supervisor's side: a new private file for each run, and its events as they arrive."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coordinator.events.event import KINDS, Event

LINE_BYTES = 1 << 20
"""A line longer than this is not ours."""


class EventFile:
    """Makes `path` (mode 0600) and reads what is appended to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.unlink(missing_ok=True)
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._rest = b""

    def new(self) -> Iterator[Event]:
        """Events since the last call; a line that is none is passed over."""
        while block := os.read(self._handle, 1 << 16):
            *lines, self._rest = (self._rest + block).split(b"\n")
            if len(self._rest) > LINE_BYTES:
                self._rest = b""
            for line in lines:
                if (event := read_event(line)) is not None:
                    yield event

    def close(self) -> None:
        os.close(self._handle)


def read_event(line: bytes) -> Event | None:
    """An event, or None for what is none: not JSON, of an unknown kind, or with other fields."""
    try:
        found: dict[str, Any] = json.loads(line)
        kind, moment = found.pop("kind"), found.pop("time", 0.0)
        fields = found
        if set(KINDS[kind]) != set(fields):
            return None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return Event(kind=kind, fields=fields, time=float(moment) if isinstance(moment, int | float) else 0.0)
