"""No scheduler: the host itself, reached by ssh. A job's processes carry its name in their environment (proc(5))."""

from __future__ import annotations

from coordinator.schedulers.scheduler import Scheduler
from facility.exchange.job_names import MARK


class NoScheduler(Scheduler):
    """None of its jobs ever waits."""

    name, title = "ssh", "ssh"

    def listing(self, name: str) -> str:
        return f"{self._processes(name)} -e 's/$/ R/'"

    def cancel(self, name: str) -> str:
        return f"{self._processes(name)} | xargs -r kill"

    def cancel_waiting(self, name: str) -> str:
        return "true"

    def _processes(self, name: str) -> str:
        return f"grep -lszxF {MARK}={name} /proc/[0-9]*/environ | sed -e 's|^/proc/||' -e 's|/environ$||'"


SCHEDULER = NoScheduler()
