"""A federation under StreamFlow whose facilities train each with a program of its own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coordinator.archive.rounds import Archive
from coordinator.archive.summary import summary
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.preflight.check import check
from coordinator.report.make import make_report
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from tests.conftest import ROOT
from tests.engine.engines import streamflow
from tests.federations import write_federation

TRAINERS = {"plain": "plain_torch_trainer", "hugging": "hugging_face_trainer", "ours": None}


@pytest.mark.nightly
@pytest.mark.slow
def test_one_facility_on_each_trainer_makes_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = write_federation(tmp_path, list(TRAINERS))
    text = path.read_text()
    for name, module in TRAINERS.items():
        text = (
            text.replace(f"- name: {name}\n", f"- name: {name}\n  trainer: {{module: {module}}}\n") if module else text
        )
    path.write_text(text)
    write_rendered(read_federation(path))
    rows = [row for row in check(path, link=False) if row.check == "trainer"]
    assert {row.verdict for row in rows} == {"fail"}, "the examples are not installed yet"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "examples"), os.environ["PYTHONPATH"]]))
    rows = check(path, link=False)
    assert not [row for row in rows if row.verdict == "fail"]
    assert sorted(row.subject for row in rows if row.check == "trainer") == ["hugging", "plain"]
    result = streamflow(path, tmp_path / "engine", timeout=280)
    assert result.returncode == 0, result.stdout[-4000:]
    archive = Archive(read_federation(path).archive_path)
    data = summary(archive)
    assert [row["status"] for entry in data["rounds"] for row in entry["facilities"]] == ["ok"] * 6
    falling = [data["initial_perplexity"], *(entry["global_perplexity"] for entry in data["rounds"])]
    assert falling[0] > falling[1] > falling[2], falling
    assert len(data["final_evaluation"]) == 3
    weights = open_checkpoint(archive.model_for(2))
    assert weights.tensors.keys() == open_checkpoint(tmp_path / "model").tensors.keys()
    page = make_report(path, tmp_path / "report.html", "html").read_text()
    assert all(name in page for name in TRAINERS)
