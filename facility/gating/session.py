"""The context of one request: the policy, the coordinator that asks, and the files that the gate keeps."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from facility.exchange.files import audit_log
from facility.exchange.job_names import job_name, waiting_name
from facility.gating.ledger import hour_of, ledger_locked
from facility.gating.policy import Policy
from facility.gating.refusal import Refused

ENTRY = 4096
"""Bytes that a file, a directory or a link counts with beside its content."""
STEP = 64 << 20
"""Bytes that are taken at once from what may come in: the ledger is written for each step."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """What every verb is given."""

    policy: Policy
    key: str
    """Fingerprint of the ssh key that came in, as authorized_keys names it."""
    state: Path
    """The gate's own directory, outside of the workdir."""

    @property
    def home(self) -> Path:
        """Where setup.sh installed this facility; a gate by itself has its policy there."""
        return Path(os.environ.get("CROSSFED_HOME") or self.state.parent)

    @property
    def log(self) -> Path:
        return self.state / "audit.jsonl"

    @property
    def ledger(self) -> Path:
        return self.state / "ledger.json"

    @property
    def workdir(self) -> Path:
        return self.policy.place

    def names(self) -> list[str]:
        """Names of our jobs in the queue: those of rounds, and those that wait for one."""
        federations = self.policy.federations
        return [*map(self.job_name, federations), *map(self.waiting_name, federations)]

    def job_name(self, federation: str) -> str:
        """Name of a round's job in the queue."""
        return job_name(federation, self.policy.facility)

    def waiting_name(self, federation: str) -> str:
        """Name of a job that waits for its round."""
        return waiting_name(self.job_name(federation))

    def write(self, what: str, **fields: Any) -> str:
        """A line in the audit log; returns its digest."""
        client = os.environ.get("SSH_CLIENT", "").split(" ")[0]
        return audit_log.append(self.log, what, key=self.key, client=client, **fields)

    def take_out(self, count: int) -> None:
        """Count bytes that are about to leave. Raises `Refused` where they exceed the day's share."""
        with ledger_locked(self.ledger) as (ledger, now):
            left, most = ledger.bytes_out(now), self.policy.bytes_out_per_day
            if left + count > most:
                raise Refused(
                    f"{count} bytes more would leave, {left} left within 24 hours, and the policy's bytes_out_per_day "
                    f"is {most}"
                )
            ledger.let_out(count, now)


class Incoming:
    """Bytes that one request brings, counted before they are written; leaving gives back what was taken in vain."""

    def __init__(self, session: Session) -> None:
        self.session, self.left, self.hour = session, 0, ""

    def take(self, count: int) -> None:
        """Raise `Refused` where these bytes exceed the day's share."""
        if count > self.left:
            self._take_more(count - self.left)
        self.left -= count

    def _take_more(self, wanted: int) -> None:
        with ledger_locked(self.session.ledger) as (ledger, now):
            most = self.session.policy.bytes_in_per_day
            room = most - ledger.bytes_in(now)
            if wanted > room:
                raise Refused(
                    f"{wanted} bytes more would come in, {max(0, room)} may within 24 hours: the policy's "
                    f"bytes_in_per_day is {most}"
                )
            taken = min(room, max(wanted, STEP))
            ledger.let_in(taken, now)
            self.left, self.hour = self.left + taken, hour_of(now)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if not self.left:
            return
        with ledger_locked(self.session.ledger) as (ledger, _):
            if self.hour in ledger.into:  # the hour that it was taken in: another one's would be too little for a day
                ledger.into[self.hour] -= min(self.left, ledger.into[self.hour])
