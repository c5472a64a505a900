"""A whole federation that ends with every model on everybody's data, and is evaluated on tasks on the way."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from coordinator.archive.rounds import Archive
from coordinator.config.federation import read_federation
from coordinator.engine.render import write_rendered
from coordinator.report.make import data_of, make_report
from facility.exchange.checkpoints.tokenizer import tokenizer_digest
from tests.engine.engines import crossfed, streamflow
from tests.federations import write_dataset, write_federation
from tests.rounds.test_evaluation import write_model, write_task

NAMES = ["site-a.1", "b_2"]


def made(root: Path, **evaluation: object) -> Path:
    """Two facilities, one of two processes; the pico model has a tokenizer, so that lm-eval can read tasks to it."""
    path = write_federation(root, NAMES, rounds=1, evaluation={"matrix": True, "alone": True} | evaluation)
    shutil.rmtree(root / "model")
    write_model(root / "model")
    write_dataset(root / "held", seed=8)
    for dataset in (root / "held", *(root / "sites" / name / "dataset" for name in NAMES)):
        told = json.loads((dataset / "dataset.json").read_text())
        told["tokenizer_sha256"] = tokenizer_digest(root / "model")
        (dataset / "dataset.json").write_text(json.dumps(told))
    path.write_text(path.read_text().replace("- name: site-a.1\n", "- name: site-a.1\n  training: {ranks: 2}\n"))
    write_rendered(read_federation(path))
    return path


def cell(matrix: dict, data: str, model: str) -> dict:
    return next(one for one in matrix["cells"] if (one["data"], one["model"]) == (data, model))


@pytest.mark.nightly
@pytest.mark.slow
def test_the_matrix_of_a_federation_has_what_the_rounds_reported(tmp_path: Path):
    pytest.importorskip("lm_eval")
    tasks = write_task(tmp_path / "tasks")
    held_out = {"facility": "b_2", "dataset": "../held", "name": "counting by nine"}
    path = made(
        tmp_path, tasks=["count_up"], directory=str(tasks), facility="coordinator", held_out=held_out, models_per_job=4
    )
    result = streamflow(path, tmp_path / "engine", timeout=900)
    assert result.returncode == 0, result.stdout[-4000:]
    data = data_of(read_federation(path))
    matrix, row = data["matrix"], {one["facility"]: one for one in data["rounds"][0]["facilities"]}
    final = {one["facility"]: one for one in data["final_evaluation"]}
    assert matrix["complete"] and not matrix["gaps"] and len(matrix["cells"]) == 3 * 6
    for name in NAMES:
        told = cell(matrix, name, f"{name}'s update")
        assert told["perplexity"] == pytest.approx(row[name]["perplexity_returned"], rel=1e-5)
        assert cell(matrix, name, "initial")["perplexity"] == pytest.approx(row[name]["perplexity_received"], rel=1e-5)
        assert cell(matrix, name, "global")["perplexity"] == pytest.approx(final[name]["perplexity_received"], rel=1e-5)
        assert told["interval"][0] < told["perplexity"] < told["interval"][1]
        assert matrix["alone"][name]["tokens"] == row[name]["tokens"]
    assert len(matrix["verdicts"]) == 5 and any("no facility trained on" in line for line in matrix["verdicts"])
    own = [one for one in data["tasks"] if one["facility"] == "coordinator" and one["metric"] == "acc"]
    assert [one["round"] for one in own] == [0, 1] and all(0 <= one["value"] <= 1 for one in own)
    page = make_report(path).read_text()
    assert "counting by nine" in page and "count_up" in page
    # The archive's line of models is that of the rounds alone, and single updates are gone.
    archive = Archive(read_federation(path).archive_path)
    assert archive.rounds() == [0] and not (archive.path / "comparison").exists()
    again = crossfed("run", "--quiet", "-f", path, folder=tmp_path / "engine")
    text, _ = again.communicate(timeout=240)
    assert again.returncode == 0 and "evaluating" not in text, text


@pytest.mark.nightly
@pytest.mark.slow
def test_adapters_are_compared_and_a_facility_that_is_gone_is_a_gap(tmp_path: Path):
    path = made(tmp_path)
    path.write_text(path.read_text().replace("training:\n", "training:\n  lora: {rank: 2}\n", 1))
    write_rendered(read_federation(path))
    archive = Archive(read_federation(path).archive_path)
    process = crossfed("run", "--quiet", "-f", path, folder=tmp_path / "engine")
    seen: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(line)
        if "rounds done" in line and (tmp_path / "sites" / "b_2" / "dataset").exists():
            shutil.rmtree(tmp_path / "sites" / "b_2" / "dataset")
    assert process.wait(timeout=200) == 0, "".join(seen)[-4000:]
    matrix = data_of(read_federation(path))["matrix"]
    assert matrix["data"] == ["site-a.1"] and "there is no dataset" in matrix["gaps"]["b_2"]
    assert {"b_2's update", "b_2 alone", "site-a.1 alone"} <= set(matrix["models"])
    assert archive.rounds() == [0]
