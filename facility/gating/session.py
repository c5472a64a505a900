"""The context of one request: the policy, the coordinator that asks, and the files that the gate keeps."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facility.exchange.files import audit_log
from facility.exchange.job_names import job_name, waiting_name
from facility.gating.ledger import changed
from facility.gating.policy import Policy
from facility.gating.refusal import Refused


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
        with changed(self.ledger) as (ledger, now):
            left, most = ledger.bytes_out(now), self.policy.bytes_out_per_day
            if left + count > most:
                raise Refused(
                    f"{count} bytes more would leave, {left} left within 24 hours, and the policy's bytes_out_per_day "
                    f"is {most}"
                )
            ledger.let_out(count, now)
