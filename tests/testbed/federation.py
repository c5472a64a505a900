"""A federation over the testbed, for tests: rendered, deployed by ssh and Slurm, and run under supervision."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from coordinator.archive import Archive
from coordinator.federation import read_federation
from coordinator.queues import read_queues
from coordinator.render import write
from coordinator.run import engine_command
from coordinator.supervise import Limits, Supervisor
from coordinator.testbed.layout import Testbed

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = """\
#!/bin/bash
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={tasks}
#SBATCH --time=00:10:00
#SBATCH --output=%x-%j.log
export PATH={python}:$PATH PYTHONPATH={code} OMP_NUM_THREADS=1 {extra}
cat > job-$SLURM_JOB_ID.sh <<'CROSSFED_END'
{{{{ streamflow_command }}}}
CROSSFED_END
{launch} bash job-$SLURM_JOB_ID.sh
"""


def metadata(folder: Path) -> Path:
    """A directory that, on PYTHONPATH, makes StreamFlow find the plug-in of a checkout that is not installed."""
    place = folder / "crossfed-0.dist-info"
    place.mkdir(parents=True, exist_ok=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: crossfed\nVersion: 0\n")
    entry = "[unito.streamflow.plugin]\ncrossfed = coordinator.transfer.plugin:CrossFedPlugin\n"
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
        return Supervisor(
            command=lambda: engine_command(federation),
            directory=self.file.parent,
            environment=self.environment(),
            queues=read_queues(self.file.parent / "streamflow.yml"),
            on_line=self.log.append,
            say=self.said.append,
            rounds_done=lambda: len(archive.rounds()),
            stopped=lambda: str(archive.read_note("stopped").get("reason", "")),
            limits=Limits(**({"pause_seconds": 2.0, "silence_seconds": 120.0} | limits)),
        )

    def run(self, **limits) -> int:
        """Run to the end; returns the exit code."""
        os.environ["HOME"] = str(self.testbed.coordinator_home)
        self.result = self.supervisor(**limits).run()
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
    testbed: Testbed, folder: Path, model: Path, datasets: dict[str, str], *, name: str, rounds: int = 2, steps: int = 3,
    tasks: dict[str, int] | None = None, extra: str = "", polling: int = 1, minimum: int = 1, workdir: str = "work",
) -> Run:  # fmt: skip
    """Write and render federation.yml; deploy every facility by ssh and Slurm."""
    place = folder / "workflow"
    place.mkdir(parents=True)
    text = {
        "name": name,
        "model": str(model),
        "rounds": rounds,
        "seed": 1,
        "archive": str(folder / "archive"),
        "workdir": str(folder / "work"),
        "minimum_facilities": minimum,
        "training": {"steps": steps, "batch_sequences": 4, "learning_rate": 1e-3, "device": "cpu"},
        "facilities": [{"name": site.name, "dataset": datasets[site.name]} for site in testbed.sites],
    }
    file = place / "federation.yml"
    for entry in text["facilities"]:
        Path(entry["dataset"])
    file.write_text(yaml.safe_dump(text, sort_keys=False))
    write(read_federation(file))
    deploy(testbed, place / "streamflow.yml", name, tasks or {}, extra, polling, workdir)
    return Run(testbed=testbed, file=file)


def deploy(
    testbed: Testbed, file: Path, name: str, tasks: dict[str, int], extra: str, polling: int, workdir: str
) -> None:
    data = yaml.safe_load(file.read_text())
    for site in testbed.sites:
        count = tasks.get(site.name, 1)
        template = file.parent / f"{site.name}.sh"
        template.write_text(
            TEMPLATE.format(
                nodes=1, tasks=count, python=testbed.python.parent, code=site.code, extra=extra,
                launch="srun" if count > 1 else "",
            )
        )  # fmt: skip
        inner = {
            "nodes": [site.address], "username": site.user, "sshKey": str(testbed.key), "checkHostKey": True,
            "retries": 60, "retryDelay": 2, "maxConnections": 1,
        }  # fmt: skip
        service = {"file": template.name, "jobName": f"crossfed-{name}-{site.name}"}
        place = f"{site.home}/{workdir}"
        data["deployments"][f"facility-{site.name}-ssh"] = {"type": "ssh", "config": inner, "workdir": place}
        data["deployments"][f"facility-{site.name}"] = {
            "type": "slurm",
            "config": {"maxConcurrentJobs": 2, "pollingInterval": polling, "services": {"train": service}},
            "wraps": f"facility-{site.name}-ssh",
            "workdir": place,
        }
    for binding in data["workflows"][name]["bindings"]:
        if "/train_" in binding["step"]:
            binding["target"]["service"] = "train"
    file.write_text(yaml.safe_dump(data, sort_keys=False))
