"""PBS and Flux, end to end under StreamFlow, against stand-ins for their commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from facility.exchange.messages.report import read_failure, read_report
from tests.engine import queues
from tests.engine.engines import bare_environment
from tests.federations import write_federation

ROOT = Path(__file__).resolve().parents[2]
FILL = {"pbs": {"account": "a", "queue": "q"}, "flux": {"bank": "a", "queue": "q"}}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["pbs", "flux"])
def test_a_round_through_the_queue(tmp_path: Path, kind: str):
    file = write_federation(tmp_path, ["far"], rounds=1, final_evaluation=False)
    home, work, queue = tmp_path / "it's home", tmp_path / "sites-work", tmp_path / "queue"
    for folder in (home, work, queue):
        folder.mkdir()
    (home / "env.sh").write_text(
        f"export PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={ROOT} CROSSFED_STATE='{tmp_path}/state' "
        "OMP_NUM_THREADS=1\n"
    )
    described = yaml.safe_load(file.read_text())
    far = described["facilities"][0]
    far["dataset"] = str((file.parent / far["dataset"]).resolve())
    far["deployment"] = {
        "type": kind,
        "workdir": str(work),
        "template": str(ROOT / "templates" / f"{kind}.sh"),
        "fill": FILL[kind],
        "environment": {"home": str(home)},
        "polling_seconds": 1,
    }
    file.write_text(yaml.safe_dump(described))
    write_rendered(read_federation(file))
    environment = bare_environment(tmp_path / "machine")
    environment["PATH"] = f"{queues.install(tmp_path / 'commands')}{os.pathsep}{environment['PATH']}"
    result = subprocess.run(
        ["streamflow", "run", "--outdir", str(tmp_path / "out"), "streamflow.yml"],
        cwd=file.parent,
        env=environment | {"QUEUE": str(queue)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=200,
    )
    logs = "\n".join(p.read_text() for p in tmp_path.rglob("crossfed-job.log"))
    assert result.returncode == 0, result.stdout[-3000:] + logs
    archive = read_federation(file).archive_path
    assert (archive / "round-0000" / "model").is_dir()
    assert len(list(queue.glob("*.script"))) == 1, "submitted once"
    found = [read_failure(p.parent) for p in work.rglob("failure.json")]
    assert found == [] and [read_report(p.parent).facility for p in work.rglob("update/report.json")] == ["far"]
