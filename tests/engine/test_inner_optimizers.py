"""A federation whose facilities differ in inner optimizer and in the components of the adapters that they train."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from facility.exchange.checkpoints.adapters import A, is_factor
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.moments import FIRST, StoredMoments, shapes_in
from tests.engine.engines import streamflow
from tests.federations import write_federation

OWN = {
    "a": {"optimizer": "muon", "first_moments": "mean"},
    "b": {"optimizer": "adafactor", "lora": {"rank": 4, "trained_rank": 2}},
    "c": {"first_moments": "mean"},
}


@pytest.mark.slow
def test_muon_adafactor_and_adamw_train_adapters_of_differing_ranks_together(tmp_path: Path):
    path = write_federation(tmp_path, list(OWN), training={"lora": {"rank": 4}}, rounds=2)
    told = yaml.safe_load(path.read_text())
    for one in told["facilities"]:
        one["training"] = OWN[one["name"]]
    path.write_text(yaml.safe_dump(told, sort_keys=False))
    federation = read_federation(path)
    assert federation.aggregation.rule == "mean" and "adapters" in federation.chosen  # `auto` chose
    write_rendered(federation)
    result = streamflow(path, tmp_path / "engine", timeout=900)
    assert result.returncode == 0, result.stdout[-4000:]
    archive = Archive(federation.archive_path)
    history = archive.history()
    assert [[row.status for row in entry.facilities] for entry in history] == [["ok"] * 3] * 2
    losses = [entry.global_loss for entry in history]
    assert losses[0] is not None and losses[1] is not None and losses[1] < losses[0]
    factors = open_checkpoint(archive.model_for(2))
    ranks = {factors.tensors[name].shape[0] for name in factors.tensors if is_factor(name) and A in name}
    assert ranks == {4}
    # Momenta of Muon and first moments of AdamW are means of gradients: averaged, and sent with the next model.
    first = StoredMoments(archive.model_for(1), shapes_in(open_checkpoint(archive.model_for(1))))
    assert {moment.form for moment in first.moments.values()} == {FIRST} and len(first.moments) > len(ranks)
    sent = {row.facility: row.moments_bytes for row in history[0].facilities}
    assert sent["b"] == 0 < min(sent["a"], sent["c"])
    assert min(row.moments_bytes for row in history[1].facilities) > 0  # they came with the model of this round
