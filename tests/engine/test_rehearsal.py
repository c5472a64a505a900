"""The rehearsals of large models run to their end at the smallest size, and stay within the stated disks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from tests.bench import rehearsals
from tests.bench.large_models import SHAPES, write_adapters, write_model, write_sparse_base
from tests.bench.own_sshd import SSHD
from tests.bench.rehearsal import LORA, in_a_folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "transfer"),
    [
        pytest.param("perturb", "ssh", marks=pytest.mark.skipif(SSHD is None, reason="needs openssh-server")),
        ("adapters", "local"),
    ],
)
def test_a_rehearsal_runs_to_its_end_within_the_stated_disks(kind: str, transfer: str, tmp_path: Path):
    found = in_a_folder(tmp_path / "made", kind, "tiny", 2, 2, transfer=transfer)
    assert found["ended"] == "well", (found["by_round"], found["log"])
    assert found["updates_averaged"] == 4 and found["transfer"] == transfer
    assert found["coordinator_largest_megabytes"] < 500
    disk = found["gigabytes_of_disk"]
    bounds = disk["stated_bounds"]
    slack = 0.01  # logs, manifests and the rendered workflow
    assert disk["at_most"] - disk["before"] <= bounds["coordinator"] + 2 * bounds["a_facility"] + slack


def test_models_are_as_large_as_they_say(tmp_path: Path):
    shape = SHAPES["tiny"]
    whole = open_checkpoint(write_model(tmp_path / "model", shape))
    base = open_checkpoint(write_sparse_base(tmp_path / "base", shape))
    assert whole.parameters == base.parameters == shape.parameters
    assert {n: e.shape for n, e in whole.tensors.items()} == {n: e.shape for n, e in base.tensors.items()}
    layers = {
        name.partition(".lora_")[0] for name in open_checkpoint(write_adapters(tmp_path / "a", shape, LORA)).tensors
    }
    assert len(layers) == 2 * shape.layers
    assert [round(SHAPES[name].parameters / 1e9, 1) for name in ("1.1b", "3b", "8b")] == [1.1, 3.4, 8.0]


def test_what_there_is_no_time_for_is_left_out_and_said(tmp_path: Path, monkeypatch, capsys):
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["rehearsals.py", "--minutes", "0", "--work", str(tmp_path), "--out", str(out)])
    assert rehearsals.main() == 0
    found = json.loads(out.read_text())["rehearsals"]
    assert set(found) == {"full-1.1b", "lora-1.1b", "lora-8b", "perturb-3b"}
    assert all("left" in one["left_out"] for one in found.values())
    assert json.loads(capsys.readouterr().out)["rehearsals"] == found
