"""The site of `test_ahead` behind its gate: the gate's own code, with a queue that answers as Slurm does."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

from coordinator.schedulers.gated import Gated
from coordinator.streamflow_plugin.gate import GateRefused, job_of
from coordinator.streamflow_plugin.handing_over import ByGate, Submission
from facility.exchange.exit_codes import BROKE, ExitCode
from facility.gating import queue
from tests.security.test_gate import Gate

ENDED = ("COMPLETED", "CANCELLED", "FAILED")


def gated(site: Any, gate: Gate) -> Any:
    """The same site, reached by requests."""

    class GatedSite(type(site)):  # type: ignore[misc]
        @property
        def scheduler(self) -> Any:
            return Gated(self.wording.scheduler)

        def reach(self) -> ByGate:
            return ByGate(self)

        def submission(self, number: int) -> Submission:
            """The command that the engine makes of a round whose model has come."""
            words = gate.round(number).split()
            own = gate.workdir / uuid.uuid4().hex
            own.mkdir()
            options = " ".join(words[words.index("--model") :])
            home = f'export HOME="{own}" && export TMPDIR="{gate.workdir}/tmp"'
            command = f"cd {own} && {home} && python3 -m facility.round --out update {options} 2>&1"
            return Submission(command=command, job_name=f"/rounds/train_a/0.{number}", workdir=str(own))

        def submit_round(self, one: Submission) -> None:
            """As always: what makes the gate know the settings of this run."""
            gate.ask(job_of(one.command, "submit"))

        async def shell_line(self, location: Any, line: str) -> tuple[str, int]:
            how = self.lost.pop(0) if self.lost and "hand-over" in line else ""
            if how == "before":
                return "", BROKE
            code, out, error = gate.ask(line)
            if code == ExitCode.REFUSED:
                raise GateRefused(error)
            return ("", BROKE) if how == "after" else (out.decode() + error, code)

        async def states_of(self, ids: list[str], location: Any) -> dict[str, str]:
            text, code = await self.shell_line(location, self.scheduler.query(ids))
            return dict(self.scheduler.read_states(text, code, ids))

        async def submit_ahead(self, one: Submission, location: Any) -> str:
            if self.refuses:
                raise RuntimeError("sbatch: error: QOSMaxSubmitJobPerUserLimit")
            text, code = await self.shell_line(location, one.command)
            assert code == 0, text
            return str(self.scheduler.read_id(text))

        def answer(self, command: list[str], text: str | None = None, cwd: Path | None = None) -> tuple[int, str]:
            """Of Slurm's programs."""
            name, words = command[0], " ".join(command)
            if name == "sbatch" and "facility.ahead" in (text or ""):
                return 0, f"{self.submit(words.partition('--chdir=')[2].split()[0])}\n"
            if name == "sbatch":
                return 0, f"{5000 + len(list(gate.workdir.iterdir()))}\n"
            if name == "scancel":
                for id in command[1:]:
                    self.cancel(id)
                return 0, ""
            alive = {id: one["state"] for id, one in self.jobs.items() if one["state"] not in ENDED}
            if "-t all" in words:
                asked = command[-1].split(",")
                return 0, "".join(f"{id} {self.jobs[id]['state']}\n" for id in asked if id in self.jobs)
            if not words.partition(" -n ")[2].split()[0].endswith("-ahead"):
                return 0, ""
            return 0, "".join(f"{id} {state} None\n" if "%T" in words else f"{id}\n" for id, state in alive.items())

    site.__class__ = GatedSite
    gate.policy(ahead_seconds=300.0, node_hours_per_day=1000.0)
    gate.monkeypatch.setattr(queue, "run_program", site.answer)
    return site
