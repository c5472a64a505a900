"""Secure aggregation over three Slurm clusters: keys and answers by ssh to the login nodes, masks inside the jobs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.testbed.layout import Testbed
from coordinator.testbed.rehearsal import copy_to, prepare_sites, ssh, write_federation
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from tests.masking.federation import ssh_keys
from tests.testbed.federation import Run, jobs

pytestmark = pytest.mark.testbed
NAMES = ["site-a", "site-b", "site-c"]


def test_rounds_are_masked_and_go_on_when_a_facility_is_lost(
    three: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HOME", str(three.coordinator_home))
    model, datasets = prepare_sites(three)
    signers = ssh_keys(tmp_path / "keys", NAMES)
    for site in three.sites:
        own = tmp_path / "for" / site.name
        own.mkdir(parents=True)
        shutil.copy(signers, own / "signers")
        shutil.copy(signers.parent / site.name, own / "id")
        copy_to(three, site, own, "masking")
    training = {"steps": 5, "batch_sequences": 4, "learning_rate": 1e-3, "device": "cpu", "export_dtype": "float32"}
    file = write_federation(
        three,
        tmp_path / "federation",
        model,
        datasets,
        name="masked",
        rounds=2,
        tasks={},
        training=training | {"signing_key": "~/masking/id"},
        aggregation={"rule": "mean", "allowed_signers": str(signers)},
        privacy={"secure_aggregation": True, "minimum_sum": 2, "peer_signers": "~/masking/signers"},
        final_evaluation=False,
    )
    write_rendered(read_federation(file))
    run = Run(testbed=three, file=file)

    class Losing(list):
        """The log; site-c loses its dataset when round 0 is complete."""

        def append(self, line: str) -> None:
            if "round 0 is complete" in line:
                ssh(three, three.site("site-c"), "mv dataset gone")
            super().append(line)

    run.log = Losing()
    assert run.run() == 0, run.text()
    history = run.archive.history()
    assert [sorted(row.facility for row in entry.facilities if row.status == "ok") for entry in history] == [
        NAMES,
        NAMES[:2],
    ]
    assert history[1].global_loss < history[0].global_loss
    assert [len(jobs(run, three.site(name))) for name in NAMES[:2]] == [2, 2]  # keys and answers took no queue
    for site in three.sites:
        for place in sorted((site.home / "work").glob("*/update/manifest.json")):
            manifest = json.loads(place.read_text())
            if manifest["kind"] == "update" and manifest["federation"] == "masked" and manifest["parameters"]:
                assert manifest["encoding"] == "masked"
                assert {entry.dtype for entry in open_checkpoint(place.parent).tensors.values()} == {"U16"}
        keys = site.home / ".crossfed" / "masked" / site.name / "masking" / "keys"
        modes = subprocess.run(["stat", "-c", "%a", *keys.glob("*.json")], capture_output=True, text=True).stdout
        assert set(modes.split()) == {"600"}
