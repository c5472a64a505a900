"""Federations of three with secure aggregation under StreamFlow: real trainer processes, real masks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from coordinator.archive.rounds import Archive
from coordinator.archive.summary import summary
from coordinator.config.federation import read_federation
from coordinator.engine.render import write
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from tests.engine.engines import crossfed, killed_at, streamflow, weights
from tests.federations import write_federation
from tests.masking.federation import ssh_keys

NAMES = ["alpha", "b_2", "gamma"]


def make(root: Path, *, masked: bool = True, **changes: object) -> Path:
    """federation.yml of three local facilities, rendered."""
    signers = ssh_keys(root / "keys", NAMES)
    aggregation = {"rule": "mean", "clip_ratio": 0}
    more = {"privacy": {"secure_aggregation": True, "peer_signers": str(signers)}} if masked else {}
    if masked:
        aggregation["allowed_signers"] = str(signers)
    training = {"export_dtype": "float32"} | changes.pop("training", {})  # type: ignore[call-overload, operator]
    path = write_federation(root, NAMES, training=training, aggregation=aggregation, **more, **changes)  # type: ignore[arg-type]
    text = path.read_text()
    for name in NAMES:
        text = text.replace(f"- name: {name}\n", f"- name: {name}\n  training: {{signing_key: {root}/keys/{name}}}\n")
    path.write_text(text)
    write(read_federation(path))
    return path


def archive_of(path: Path) -> Archive:
    return Archive(read_federation(path).archive_path)


@pytest.mark.slow
@pytest.mark.parametrize("training", [{}, {"lora": {"rank": 2}}], ids=["full", "lora"])
def test_masked_rounds_learn_what_plain_rounds_learn(tmp_path: Path, training: dict[str, object]):
    path = make(tmp_path / "masked", training=training)
    result = streamflow(path, tmp_path / "masked" / "engine")
    assert result.returncode == 0, result.stdout[-6000:]
    plain = make(tmp_path / "plain", masked=False, training=training)
    assert streamflow(plain, tmp_path / "plain" / "engine").returncode == 0
    rows = summary(archive_of(path))["rounds"]
    assert [row["status"] for entry in rows for row in entry["facilities"]] == ["ok"] * 6
    told = json.loads((archive_of(path).path / "round-0001" / "round.json").read_text())["aggregation"]["details"]
    assert told["masking"]["survivors"] == told["masking"]["answered"] == NAMES
    one, two = (summary(archive_of(p))["rounds"][-1]["global_perplexity"] for p in (path, plain))
    assert one == pytest.approx(two, rel=0.005)
    for update in (tmp_path / "masked" / "work").rglob("update/model.safetensors"):
        assert {entry.dtype for entry in open_checkpoint(update.parent).tensors.values()} == {"U16"}


@pytest.mark.slow
def test_killed_at_each_step_the_same_command_completes_the_same_rounds(tmp_path: Path):
    path = make(tmp_path, rounds=1)
    for moment in ("alpha training", "gamma receiving", "b_2 unmasking", "averaging"):
        killed_at(moment, path, tmp_path / "engine")
    process = crossfed("run", "--quiet", "-f", path, folder=tmp_path / "engine")
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    assert len(weights(path)) == 1 and not (archive_of(path).path / "unmasking").exists()
    rows = summary(archive_of(path))["rounds"][0]["facilities"]
    assert [row["status"] for row in rows] == ["ok"] * 3


@pytest.mark.slow
def test_a_facility_that_fails_is_left_out_of_the_sum(tmp_path: Path):
    path = make(tmp_path, rounds=1)
    shutil.rmtree(tmp_path / "sites" / "b_2" / "dataset")
    result = streamflow(path, tmp_path / "engine")
    assert result.returncode == 0, result.stdout[-4000:]
    rows = {row["facility"]: row for row in summary(archive_of(path))["rounds"][0]["facilities"]}
    assert {name: row["status"] for name, row in rows.items()} == {"alpha": "ok", "b_2": "failed", "gamma": "ok"}
