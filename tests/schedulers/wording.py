"""What each scheduler says of made-up jobs: the words of recordings, with another id and state."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod

from coordinator.schedulers.flux import SCHEDULER as FLUX
from coordinator.schedulers.gridengine import SCHEDULER as GRID_ENGINE
from coordinator.schedulers.pbs import SCHEDULER as PBS
from coordinator.schedulers.scheduler import BatchScheduler
from coordinator.schedulers.slurm import SCHEDULER as SLURM
from tests.schedulers.recordings import recorded

PENDING, RUNNING, ENDED = "PENDING", "RUNNING", "ENDED"
WORDS_OF_FLUX = {PENDING: "SCHED", RUNNING: "RUN"}


class Wording(ABC):
    """Answers about jobs that wait (`PENDING`), run (`RUNNING`), or have ended (`ENDED`)."""

    scheduler: BatchScheduler

    def id(self, number: int) -> str:
        return str(number)

    @abstractmethod
    def asked(self, id: str, state: str) -> tuple[str, int]:
        """The answer to a question about one job, and its code. `state`: '' for a job that there never was."""

    @abstractmethod
    def listed(self, states: dict[str, str]) -> str:
        """The listing of these jobs, of which none has ended."""


class SlurmWording(Wording):
    scheduler = SLURM

    def asked(self, id: str, state: str) -> tuple[str, int]:
        if not state:
            return "slurm_load_jobs error: Invalid job id specified", 1
        return f"{id} {'COMPLETED' if state == ENDED else state}\n", 0

    def listed(self, states: dict[str, str]) -> str:
        return "\n".join(f"{id} {state} Priority" for id, state in states.items())


class PbsWording(Wording):
    scheduler = PBS

    def id(self, number: int) -> str:
        return f"{number}.pbshead"

    def asked(self, id: str, state: str) -> tuple[str, int]:
        if state in (PENDING, RUNNING):
            return self.listed({id: state}), 0
        answer, known = ("ended-with-history", "36") if state else ("unknown", "99")
        found = recorded(f"pbs-qstat-f-{'json-' if state else ''}{answer}")
        return found.texts[0].replace(f"{known}.pbshead", id), found.code

    def listed(self, states: dict[str, str]) -> str:
        answer = json.loads(recorded("pbs-qstat-f-json").out, strict=False)
        like = {state: answer["Jobs"][f"{number}.pbshead"] for state, number in ((RUNNING, 10), (PENDING, 19))}
        return json.dumps(answer | {"Jobs": {id: like[state] for id, state in states.items()}})


class FluxWording(Wording):
    scheduler = FLUX

    def id(self, number: int) -> str:
        return f"ƒ{number}"

    def asked(self, id: str, state: str) -> tuple[str, int]:
        if not state:
            found = recorded("flux-jobs-returncode-unknown")
            return found.err.replace("fABCDEFG", id), found.code
        said = recorded("flux-jobs-returncode-cancelled").out.strip() if state == ENDED else ""
        return f"{id} {said or WORDS_OF_FLUX[state]}\n", 0

    def listed(self, states: dict[str, str]) -> str:
        rows = recorded("flux-jobs-listing").out.splitlines()
        like = {state: next(row for row in rows if f" {word} " in row) for state, word in WORDS_OF_FLUX.items()}
        return "\n".join(re.sub(r"^\S+", id, like[state]) for id, state in states.items())


class GridEngineWording(Wording):
    scheduler = GRID_ENGINE

    def asked(self, id: str, state: str) -> tuple[str, int]:
        table = recorded("gridengine-qstat-running").out
        number = {PENDING: 5, RUNNING: 1}.get(state)
        if number is not None:
            return re.sub(rf"^ +{number} ", f"{id:>7} ", table, flags=re.MULTILINE), 0
        return table + recorded("gridengine-qstat-j-ended").err.replace("1", id), 0

    def listed(self, states: dict[str, str]) -> str:
        return "\n".join(f"{id} {'qw' if state == PENDING else 'r'}" for id, state in states.items())


WORDINGS = {one.scheduler.name: one for one in (SlurmWording(), PbsWording(), FluxWording(), GridEngineWording())}
