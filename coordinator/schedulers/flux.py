"""Flux: https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man1/flux-jobs.html, flux-queue.html."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

from coordinator.schedulers.partition import WORD, Partition, Wish, first_number
from coordinator.schedulers.scheduler import FORGOTTEN, BatchScheduler, Ending, Job, exit_code

FIELDS = "{id} {returncode} {status} {result} {exception.type} {exception.note}"
"""What is asked of a job; without a return code as yet, its field is empty."""
ROW = re.compile(r"([fƒ][A-Za-z0-9]{1,99}) +(?:(-?[0-9]{1,10}) +)?([A-Z]+)(?: +[A-Z]+)?(?: +(.*))?")
"""An answer's line: id, return code, status, result and what was said."""
STOPPED = re.compile(r"^(?:(\S+): )?(Scheduling is stopped.*)$", re.MULTILINE)


class Flux(BatchScheduler):
    """Asks `flux jobs` by id, which lists ended jobs too. A stopped queue stands only in `flux queue status`."""

    name, title, program = "flux", "Flux", "flux"
    connector = "streamflow.deployment.connector.queue_manager:FluxConnector"
    survey = "flux queue list && flux queue status && flux resource list"
    job_id = re.compile(r"[fƒ][A-Za-z0-9]{1,99}")
    waiting = frozenset({"DEPEND", "PRIORITY", "SCHED"})
    terminal = frozenset({"COMPLETED", "FAILED", "CANCELED", "TIMEOUT"})
    finishing = frozenset({"CLEANUP"})
    silent = ("unable to connect to flux", "flux_open:")
    advice = (
        (r"urgency=0\b.*", "it is held: `flux job urgency {id} default` there"),
        (r"urgency=\d+ .*after.*", "it waits for another job: remove the dependency from the template or `options:`"),
        (
            r"Scheduling is stopped.*",
            "its queue is stopped: wait for the site, or name another in `fill: {queue: ...}`",
        ),
    )

    def submission(self, name: str, output: str) -> str:
        return f"flux batch --job-name={shlex.quote(name)} --output={shlex.quote(output)}"

    def listing(self, name: str) -> str:
        wanted = "'{id} {state} urgency={urgency} queue={queue} {dependencies}'"
        return f"flux jobs -n -f pending,running --name={name} -o {wanted} && flux queue status"

    def cancel(self, name: str) -> str:
        return f"flux jobs -n -f pending,running --name={name} -o '{{id}}' | xargs -r flux cancel"

    def cancel_waiting(self, name: str) -> str:
        return f"flux jobs -n -f pending --name={name} -o '{{id}}' | xargs -r flux cancel"

    def cancel_ids(self, ids: Sequence[str]) -> str:
        return f"flux cancel {' '.join(ids)}"

    def is_answer(self, text: str, code: int) -> bool:
        """`flux cancel` fails for a job that ended meanwhile, which is as good."""
        return code == 0 or "job is inactive" in text or "unknown job id" in text

    def read_listing(self, text: str) -> list[Job]:
        stopped = dict(STOPPED.findall(text))
        return [self._with_queue(job, stopped) for job in super().read_listing(text)]

    def _with_queue(self, job: Job, stopped: dict[str, str]) -> Job:
        queue = re.search(r" queue=(\S*)", job.reason)
        reason = re.sub(r" queue=\S*", "", job.reason).strip()
        if not job.began and (words := stopped.get(queue[1] if queue else "", stopped.get(""))):
            reason = reason if reason.startswith("urgency=0") else words
        return replace(job, reason=reason)

    def read_partitions(self, text: str) -> list[Partition]:
        """Queues of `flux queue list`, nodes of `flux resource list`; an instance without queues has one, unnamed."""
        rows = [line.split() for line in lines_of(text)]
        found = []
        for row in queue_rows(rows):
            name = row[0].rstrip("*")
            total = _resources(rows, name)
            if WORD.fullmatch(name):
                found.append(
                    Partition(
                        name=name,
                        default=row[0].endswith("*"),
                        open=(row[1], row[2]) == ("✔", "✔"),
                        nodes=total[0],
                        cores=total[1] // max(1, total[0]),
                        gpus=total[2] // max(1, total[0]),
                    )
                )
        return found

    def blocks(self, wish: Wish) -> dict[str, str]:
        return {
            "account": f"#flux: --bank={wish.account}" if wish.account else "",
            "queue": f"#flux: --queue={wish.partition}" if wish.partition else "",
            "limit": f"#flux: --time-limit={wish.hours:g}h",
        }

    def query(self, ids: Sequence[str]) -> str:
        return f"flux jobs -n -o '{FIELDS}' {' '.join(ids)}"

    def read_states(self, text: str, code: int, ids: Sequence[str]) -> dict[str, str]:
        named = {_id(one): FORGOTTEN for one in re.findall(r"^JobID (\S+) unknown", text, re.MULTILINE)}
        named |= {id: state for id, (_, state, _) in self._lines(text).items()}
        return {one: named[_id(one)] for one in ids if _id(one) in named}

    def query_ending(self, id: str) -> str:
        return self.query([id])

    def read_ending(self, text: str, code: int, id: str) -> Ending | None:
        state = self.read_states(text, code, [id]).get(id, "")
        if state == FORGOTTEN:
            return Ending(state=FORGOTTEN, code=None, detail="Flux does not know it")
        if state not in self.terminal:
            return None
        returned, _, said = self._lines(text)[_id(id)]
        by_itself = state in ("COMPLETED", "FAILED") and "exec" not in said.split()[:1]
        detail = f"{state}, exit code {returned}" + (f" ({said})" if said else "")
        return Ending(state=state, code=exit_code(returned) if by_itself else None, detail=detail)

    def _lines(self, text: str) -> dict[str, tuple[str, str, str]]:
        """Return code (or ''), status and what was said of each job."""
        found = {}
        for line in text.splitlines():
            match = ROW.fullmatch(line.strip())
            if match:
                found[_id(match[1])] = (match[2] or "", match[3], (match[4] or "").strip())
        return found


def lines_of(text: str) -> list[str]:
    """The lines that Flux printed, without colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


def queue_rows(rows: list[list[str]]) -> list[list[str]]:
    """The rows of `flux queue list` among others; the first word is the queue's name, with a star where it is the
    default."""
    start = next((place for place, row in enumerate(rows) if row[:2] == ["QUEUE", "EN"]), len(rows))
    return list(takewhile(lambda row: len(row) >= 8, rows[start + 1 :]))


def _id(text: str) -> str:
    """One spelling: Flux writes ƒ where the terminal can, f where it cannot."""
    return "ƒ" + text[1:] if text.startswith("f") else text


def _resources(rows: list[list[str]], queue: str) -> tuple[int, int, int]:
    """Nodes, cores and GPUs of a queue in `flux resource list`, in whatever state."""
    total = [0, 0, 0]
    for row in rows:
        if len(row) >= 5 and row[0] in ("free", "allocated", "down") and queue in row[1].split(","):
            counts = [word for word in row[2:] if word.isdigit()][:3]
            total = [old + first_number(new) for old, new in zip(total, counts, strict=False)]
    return total[0], total[1], total[2]


SCHEDULER = Flux()
