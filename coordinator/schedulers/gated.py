"""A scheduler behind a facility's gate: the gate runs the scheduler's own commands, and hands on what they print."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from facility.exchange.gate_requests import GATE


class Requests:
    """What a batch scheduler is asked where there is no shell: one request a question."""

    def line(self, command: str) -> str:
        """A request is sent as it is: there is no shell that could join its outputs."""
        return command

    def listing(self, name: str) -> str:
        return f"{GATE} jobs {name}"

    def cancel(self, name: str) -> str:
        return f"{GATE} cancel {name}"

    def cancel_waiting(self, name: str) -> str:
        return f"{GATE} cancel-waiting {name}"

    def cancel_ids(self, ids: Sequence[str]) -> str:
        return f"{GATE} cancel-ids {shlex.join(ids)}"

    def query(self, ids: Sequence[str]) -> str:
        return f"{GATE} states {shlex.join(ids)}"

    def query_ending(self, id: str) -> str:
        return f"{GATE} ending {shlex.quote(id)}"


class Gated(Requests):
    """Reads answers as the scheduler behind the gate does; asks by requests (`facility.gating.grammar`)."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)

    def query_begin(self, id: str) -> str:
        return f"{GATE} begins {shlex.quote(id)}" if self._behind.query_begin(id) else ""

    def end_of_output(self, id: str, path: str) -> str:
        return f"{GATE} output {shlex.quote(id)}"
