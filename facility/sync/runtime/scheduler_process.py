"""The scheduler of the replicas in a process of its own, so that it outlives the rank that started it.

Standard input brings the configuration, one line of JSON, and later the word `stop`; its end without that word means
that the rank is gone: the scheduler then serves the other replicas until they have left. Standard output says where it
listens. The process needs no torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from facility.exchange.errors import TransientError
from facility.exchange.logs import configure_logging
from facility.exchange.messages.outcome import ENDING
from facility.exchange.messages.sync import SyncSettings
from facility.exchange.validation import parse_dataclass
from facility.sync.runtime.journal import Journal
from facility.sync.runtime.service import HELLO_SECONDS, SchedulerService

STOP = b"stop\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerPlan:
    """What a scheduler is started with."""

    settings: SyncSettings
    replicas: int
    positions: int
    """Ranks of each replica."""
    steps: int
    """Steps that each replica makes."""
    address: str
    """Address that the scheduler listens on."""
    log: Path | None
    """Directory for `groups.jsonl` and `trace.json`; None: no files."""

    def service(self) -> SchedulerService:
        """The scheduler, not yet started."""
        return SchedulerService(
            self.settings.scheduler(replicas=self.replicas, steps=self.steps),
            self.settings,
            replicas=self.replicas,
            positions=self.positions,
            journal=Journal(directory=self.log),
        )


class SchedulerThread:
    """The scheduler in a thread of this process: it ends with this rank."""

    def __init__(self, plan: SchedulerPlan) -> None:
        self.service = plan.service()
        self.service.start(plan.address)
        self.contact = f"{self.service.host} {self.service.port} {self.service.token}"

    def stop(self) -> None:
        """Return when it is gone."""
        self.service.stop()


class SchedulerProcess:
    """The scheduler in a process and session of its own. `contact`: host, port and token."""

    def __init__(self, plan: SchedulerPlan) -> None:
        raw: dict[str, Any] = dataclasses.asdict(plan)
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(raw, default=str).encode() + b"\n")
        self.process.stdin.flush()
        self.contact = self.process.stdout.readline().decode().strip()
        if not self.contact:
            raise TransientError(f"the scheduler of the replicas did not start (exit code {self.process.wait()})")

    def stop(self) -> None:
        """Return when it is gone."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(STOP)
            self.process.stdin.close()
            self.process.wait(2 * HELLO_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def main() -> None:
    """Serve until stopped, or, once the rank that started it is gone, until every other has left."""
    for number in (signal.SIGINT, *ENDING):
        signal.signal(number, signal.SIG_IGN)  # sent to a whole job they ask the ranks to save and leave
    configure_logging()
    raw = json.loads(sys.stdin.buffer.readline())
    plan = SchedulerPlan(
        **raw
        | {
            "settings": parse_dataclass(SyncSettings, raw["settings"]),
            "log": None if raw["log"] is None else Path(raw["log"]),
        }
    )
    service = plan.service()
    service.start(plan.address)
    print(service.host, service.port, service.token, flush=True)
    if sys.stdin.buffer.readline() != STOP:
        while service.connected:
            time.sleep(0.1)
    service.stop()


if __name__ == "__main__":
    main()
