"""A federation of two rounds whose facility is behind FirecREST: `crossfed run`, StreamFlow, a real trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("firecrest")

import yaml

from coordinator.archive.rounds import Archive
from coordinator.archive.summary import summary
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from facility.exchange.files.paths import CHECKOUT
from facility.exchange.job_names import job_name
from tests.engine.engines import BIN, crossfed
from tests.federations import write_federation
from tests.streamflow_plugin.firecrest_server import CLIENT, SECRET, SYSTEM, FirecrestServer, Site

TEMPLATE = f"""#!/bin/bash
#SBATCH --partition=normal
#SBATCH --output=%x-%j.log
export PATH={BIN}:$PATH PYTHONPATH={CHECKOUT} OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
IFS= read -r -d '' command <<'CROSSFED' || true
{{{{ streamflow_command }}}}
CROSSFED
bash -c "$command"
"""


def federate(root: Path, server: Site) -> Path:
    """One facility, `b`, behind FirecREST."""
    path = write_federation(root, ["b"], final_evaluation=False)
    described = yaml.safe_load(path.read_text())
    secret, site = root / "secret", root / "site"
    secret.write_text(SECRET)
    site.mkdir()
    (path.parent / "site.sh").write_text(TEMPLATE)
    access = {"url": f"{server.url}/v2", "system": SYSTEM, "token_url": f"{server.url}/token"}
    access |= {"client_id": CLIENT, "client_secret_file": str(secret)}
    [one] = described["facilities"]
    one["dataset"] = str((path.parent / one["dataset"]).resolve())
    one["deployment"] = {
        "type": "firecrest",
        "firecrest": access,
        "workdir": str(site / "work"),
        "template": "site.sh",
        "polling_seconds": 1,
    }
    path.write_text(yaml.safe_dump(described, sort_keys=False))
    write_rendered(read_federation(path))
    return path


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_rounds_with_a_facility_behind_firecrest(tmp_path: Path):
    with FirecrestServer() as server:
        path = federate(tmp_path, server)
        process = crossfed("run", "--quiet", "-f", path, folder=tmp_path / "engine")
        said, _ = process.communicate(timeout=540)
        assert process.returncode == 0, said[-6000:]
        data = summary(Archive(read_federation(path).archive_path))
        assert [row["status"] for entry in data["rounds"] for row in entry["facilities"]] == ["ok"] * 2, said
        assert server.submissions == 2, "a job a round, none twice"
        ours = [job for job in server.jobs.values() if job.process is not None]
        assert {job.name for job in ours} == {job_name(read_federation(path).name, "b")}
        assert all(job.output.endswith("/crossfed-job.log") for job in ours)
        assert "b queued as job" in said and "b: its job has begun" in said
    logs = (tmp_path / "engine").rglob("*.log")
    assert not any(SECRET in log.read_text(errors="replace") for log in logs) and SECRET not in said
