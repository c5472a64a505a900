"""FirecREST v2: jobs of a Slurm or PBS cluster through its HTTP interface (https://eth-cscs.github.io/firecrest-v2).

There is no shell: the lines below are requests that `coordinator.streamflow_plugin.firecrest` answers with a JSON list
of jobs, each with `id`, `name`, `state`, `reason`, `code` and `signal`, taken from `GET /compute/{system}/jobs`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from coordinator.schedulers.gated import Requests
from coordinator.schedulers.scheduler import FORGOTTEN, BatchScheduler, Ending, Job, read_answer
from coordinator.schedulers.slurm import SCHEDULER as SLURM

NO_ANSWER = "firecrest does not answer"
FINISHED = "F"
"""PBS: the job has finished; how, its exit code says."""


class Firecrest(Requests, BatchScheduler):
    """States are those of the cluster's own scheduler, which FirecREST hands on."""

    name, title, program = "firecrest", "FirecREST", "firecrest"
    connector = "coordinator.streamflow_plugin.shell_queue:ShellQueue"
    job_id = re.compile(r"[A-Za-z0-9]{1,40}")
    waiting = SLURM.waiting | {"Q", "H", "W", "T"}
    terminal = SLURM.terminal | {FINISHED}
    suspended = SLURM.suspended | {"S", "U"}
    silent = (NO_ANSWER,)
    advice = SLURM.advice
    output_file = "crossfed-job.log"

    def read_listing(self, text: str) -> list[Job]:
        """Jobs of the listing that have not ended."""
        found = [one for one in _jobs(text) if one["state"] not in self.terminal]
        return self.jobs((one["id"], one["state"], one["reason"]) for one in found)

    def read_states(self, text: str, code: int, ids: Sequence[str]) -> dict[str, str]:
        return {one["id"]: one["state"] for one in _jobs(text) if one["id"] in ids} if code == 0 else {}

    def read_ending(self, text: str, code: int, id: str) -> Ending | None:
        found = next((one for one in _jobs(text) if one["id"] == id), None) if code == 0 else None
        if found is None or found["state"] not in {*self.terminal, FORGOTTEN}:
            return None
        state, number, signal = found["state"], found["code"], found["signal"]
        if state == FORGOTTEN:
            return Ending(state=FORGOTTEN, code=None, detail="FirecREST does not know it any more")
        how = f"{state}, exit code {number}" + (f", signal {signal}" if signal else "")
        by_itself = state in ("COMPLETED", FINISHED) or state == "FAILED" and not signal
        killed = state == FINISHED and number is not None and (number < 0 or number >= 256)  # PBS: ended by a signal
        return Ending(state=state, code=number if by_itself and not killed else None, detail=how)

    def named(self, script: str, name: str, output: str) -> str:
        """The job script with the job's name and its output file, as directives of the cluster's own scheduler."""
        if "\n#PBS " in script:
            ours, theirs = [f"#PBS -N {name}"], r"^#PBS\s+-[Noj]\b.*\n"
            ours += [f"#PBS -j oe -o {output}"] if output else []
        else:
            ours, theirs = [f"#SBATCH --job-name={name}"], r"^#SBATCH\s+(--job-name|--output|-J|-o)\b.*\n"
            ours += [f"#SBATCH --output={output}"] if output else []
        first, _, rest = re.sub(theirs, "", script, flags=re.MULTILINE).partition("\n")
        lines = [first, *ours, rest] if first.startswith("#!") else ["#!/bin/bash", *ours, first, rest]
        return "\n".join(lines)


def plain_job(raw: Any) -> dict[str, Any] | None:
    """One job of FirecREST's answer as plain values; None for what is not one: another institution's text.

    A state may be a list of words (`RUNNING`, `COMPLETING`): the job has ended only if all of them say so.
    """
    try:
        status = raw["status"]
        states = status["state"] if isinstance(status["state"], list) else [status["state"]]
        words = [str(state).split()[0] for state in states]
        id, name = str(raw["jobId"]), str(raw.get("name") or "")
    except (KeyError, TypeError, IndexError, AttributeError):
        return None
    if (
        not words
        or not re.fullmatch(r"[A-Za-z0-9]{1,40}", id)
        or not all(re.fullmatch(r"[A-Z_]{1,40}", w) for w in words)
    ):
        return None
    going_on = [word for word in words if word not in SCHEDULER.terminal]
    return {
        "id": id,
        "name": name[:200],
        "state": (going_on or words)[0],
        "reason": str(status.get("stateReason") or "").split("\n")[0][:200],
        "code": _number(status.get("exitCode")),
        "signal": _number(status.get("interruptSignal")),
    }


def _jobs(text: str) -> list[dict[str, Any]]:
    """Jobs of a request's answer; none where it is no such list."""
    found = read_answer(text)
    return [one for one in found if isinstance(one, dict) and "id" in one] if isinstance(found, list) else []


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 31 else None


SCHEDULER = Firecrest()
