"""One event, and appending it to the file that $CROSSFED_EVENTS names.

The file is in the federation's work directory and belongs to its owner alone (mode 0600). Only processes of the
coordinator write it: its workflow steps and its StreamFlow plug-in. A facility's output may be quoted in a field; it
can never be an event.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from facility.exchange.errors import InputError
from facility.exchange.files.durable import append_to
from facility.exchange.files.storage import file_error_sentence, is_storage
from facility.exchange.messages.strict_json import show_unseen

VARIABLE = "CROSSFED_EVENTS"
"""Environment variable with the file's path; unset: no events are written."""
KINDS: Mapping[str, tuple[str, ...]] = {
    "starting": ("round", "model"),
    "executing": ("step",),
    "earlier": ("facility", "job"),
    "submitted": ("step", "job"),
    "ahead": ("step", "job"),
    "waited": ("facility", "job", "seconds", "nodes", "handed", "until"),
    "estimated": ("step", "job", "begins"),
    "began": ("step", "job"),
    "requeued": ("step", "job"),
    "progress": ("step", "stage", "done", "steps", "loss", "tokens_per_second", "seconds_left"),
    "ended": ("step", "job", "code", "problem"),
    "moved": ("facility", "way", "what", "bytes", "seconds"),
    "received": ("facility", "round"),
    "refused": ("facility", "round", "reason"),
    "quorum": ("round", "delivered", "seconds", "why"),
    "late": ("facility", "round", "reason"),
    "log": ("facility", "round", "lines"),
    "complete": ("round", "decision"),
    "comparing": ("round", "what"),
    "compared": ("round", "text"),
    "again": ("round", "reason"),
    "failed": ("step", "reason", "futile"),
    "problem": ("text",),
    "host_key": ("host", "owner", "reason"),
    "login_refused": ("facility", "host", "reason"),
    "login_works": ("facility", "host"),
    "away": ("facility", "reason"),
    "back": ("facility",),
}
"""Every kind of event and its fields."""
QUOTED_CHARACTERS = 2000


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in a run."""

    kind: str
    """Key of `KINDS`."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    time: float = field(default=0.0, compare=False)
    """Seconds since 1970 on the coordinator's clock; 0: not known."""

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


def emit(kind: str, **fields: Any) -> None:
    """Append an event; does nothing unless events are asked for. A file that cannot be written stops no step."""
    assert set(fields) == set(KINDS[kind]), f"{kind} has {sorted(fields)}, expected {sorted(KINDS[kind])}"
    path = os.environ.get(VARIABLE)
    if not path:
        return
    harmless = {name: _harmless(value) for name, value in fields.items()}
    line = json.dumps({"time": time.time(), "kind": kind, **harmless}, ensure_ascii=True) + "\n"
    with suppress(OSError):
        append_to(os.open(path, os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC), line)


def _harmless(value: Any) -> Any:
    """Text, alone or in a list, quoted; anything else as it is."""
    if isinstance(value, list):
        return [_harmless(one) for one in value]
    return quote_for_display(value) if isinstance(value, str) else value


def quote_for_display(text: str) -> str:
    """Text of another machine as it may be shown: on one line, without control characters, of limited length."""
    begin = show_unseen(text[: 16 * QUOTED_CHARACTERS])
    shown = " ".join("".join(letter if letter.isprintable() else " " for letter in begin).split())
    return shown if len(shown) <= QUOTED_CHARACTERS else f"{shown[:QUOTED_CHARACTERS]} [...]"


@contextmanager
def failures_of(step: str) -> Iterator[None]:
    """Report an exception that ends a step, and raise it again."""
    try:
        yield
    except Exception as error:
        reason = file_error_sentence(error) if isinstance(error, OSError) and is_storage(error) else str(error)
        futile = isinstance(error, InputError) or is_storage(error)
        emit("failed", step=step, reason=reason or type(error).__name__, futile=futile)
        raise
