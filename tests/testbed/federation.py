"""A federation over the testbed, for tests: rendered, deployed by ssh and Slurm, and run under supervision."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from coordinator.engine.queues import read_queues
from coordinator.engine.render import write_rendered
from coordinator.engine.run import engine_command
from coordinator.engine.supervise import Limits, Supervisor
from coordinator.events.event import VARIABLE
from coordinator.events.follow import EventFile
from coordinator.testbed.layout import Site, Testbed, load
from coordinator.testbed.rehearsal import records, write_federation
from facility.exchange.job_names import job_name
from tests.engine.messages import engine_messages
from tests.testbed.gates import behind_gates, gated_sites

ROOT = Path(__file__).resolve().parents[2]


def metadata(folder: Path) -> Path:
    """A directory that, on PYTHONPATH, makes StreamFlow find the plug-in of a checkout that is not installed."""
    place = folder / "crossfed-0.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: crossfed\nVersion: 0\n")
    entry = "[unito.streamflow.plugin]\ncrossfed = coordinator.streamflow_plugin.plugin:CrossFedPlugin\n"
    (place / "entry_points.txt").write_text(entry)
    return folder


@dataclass
class Run:
    """One federation's files and its last run."""

    testbed: Testbed
    file: Path
    log: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    result: tuple[int, str] | None = None

    @property
    def archive(self) -> Archive:
        return Archive(read_federation(self.file).archive_path)

    def environment(self) -> dict[str, str]:
        paths = [str(ROOT), str(metadata(self.file.parent.parent / "metadata"))]
        return os.environ | {
            "HOME": str(self.testbed.coordinator_home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": ":".join(paths),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
        }

    def supervisor(self, **limits) -> Supervisor:
        federation = read_federation(self.file)
        archive = Archive(federation.archive_path)
        events = EventFile(self.file.parent.parent / "events.jsonl")
        engine_messages(self.said)
        return Supervisor(
            command=lambda: engine_command(federation),
            directory=self.file.parent,
            environment=self.environment() | {VARIABLE: str(events.path)},
            events=events,
            queues=read_queues(self.file.parent / "streamflow.yml"),
            on_line=self.log.append,
            rounds_done=lambda: len(archive.rounds()),
            stopped=lambda: str(archive.read_note("stopped").get("reason", "")),
            limits=Limits(**({"pause_seconds": 2.0, "silence_seconds": 120.0} | limits)),
        )

    def run(self, **limits) -> int:
        """Run to the end; returns the exit code."""
        os.environ["HOME"] = str(self.testbed.coordinator_home)
        try:
            self.result = self.supervisor(**limits).run()
        finally:
            (self.file.parent.parent / "run.log").write_text("\n".join([*self.log, *self.said]) + "\n")
        return self.result[0]

    def start(self, **limits) -> threading.Thread:
        """Run in the background; not for tests that kill (the signal on the parent's death is bound to the thread)."""
        thread = threading.Thread(target=self.run, kwargs=limits, daemon=True)
        thread.start()
        return thread

    def wait_for(self, words: str, seconds: float = 120, count: int = 1) -> str:
        """The `count`-th log line that holds `words`."""
        deadline = time.monotonic() + seconds
        while True:
            found = [line for line in self.log if words in line]
            if len(found) >= count:
                return found[count - 1]
            assert time.monotonic() < deadline, f"no {words!r} within {seconds} s in:\n" + "\n".join(self.log[-60:])
            time.sleep(0.1)

    def text(self) -> str:
        return "\n".join(self.log[-120:] + ["", *self.said])


def federate(
    testbed: Testbed,
    folder: Path,
    model: Path,
    datasets: dict[str, str],
    *,
    name: str,
    rounds: int | dict[str, object] = 2,
    tasks: dict[str, int] | None = None,
    delay: int = 0,
    minimum: int = 1,
    workdir: str = "work",
    polling: int = 1,
    prelude: str = "",
    training: dict[str, object] | None = None,
    gated: list[str] | None = None,
    gates_home: str = "",
) -> Run:
    """Write and render a federation over the testbed. Jobs wait `delay` seconds, or five minutes if `~/slow` exists.

    `gated`: facilities behind gates; None: as `gates.gated_sites` says. `gates_home`: `home` of `gates.behind_gates`.
    """
    prelude = prelude or f"if [ -e ~/slow ]; then sleep 300; fi; sleep {delay}"
    file = write_federation(
        testbed,
        folder,
        model,
        datasets,
        name=name,
        rounds=rounds,
        tasks=tasks or {},
        prelude=prelude,
        workdir=workdir,
        minimum_facilities=minimum,
        final_evaluation=False,
        polling_seconds=polling,
        **({"training": training} if training else {}),
    )
    write_rendered(read_federation(file))
    behind_gates(testbed, file, gated_sites() if gated is None else gated, home=gates_home)
    return Run(testbed=testbed, file=file)


def jobs(run: Run, site: Site) -> list[dict[str, str]]:
    """Slurm's records of this federation's finished jobs at a facility, oldest first."""
    name = job_name(read_federation(run.file).name, site.name)
    return [record for record in records(run.testbed, site) if record["Name"] == name]


if (
    __name__ == "__main__"
):  # python -m tests.testbed.federation ROOT FEDERATION.yml: for tests that kill the coordinator
    one = Run(testbed=load(Path(sys.argv[1])), file=Path(sys.argv[2]))
    code = one.run()
    print(one.text(), flush=True)
    sys.exit(code)
