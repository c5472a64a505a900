"""`crossfed check` refuses a pipeline that the trainer cannot cut a model into, in the trainer's words."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.config.federation import read_federation
from coordinator.memory.figures import model_figures
from coordinator.preflight.probe_answer import DatasetAnswer
from coordinator.preflight.stages import check_stages
from facility.exchange.errors import InputError
from facility.training.data.tasks import CausalLM
from facility.training.model import read_config
from facility.training.parallel.split import inspect_model
from tests.training.family_trial import save_family

PIPE = "{ranks: 2, layout: {stages: 2}}"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["roformer", "bloom", "zamba2"])
def test_a_model_that_cannot_be_cut_is_told_before_a_job(tmp_path: Path, family: str):
    model = save_family(tmp_path / "model", "causal", family)
    path = tmp_path / "federation.yml"
    entries = {"far": PIPE, "near": PIPE, "plain": "{ranks: 2}", "own": f"{PIPE}, trainer: {{module: mine}}"}
    facilities = "".join(f"  - {{name: {name}, dataset: d, training: {one}}}\n" for name, one in entries.items())
    path.write_text(f"name: f\nmodel: {model}\nrounds: 1\nfacilities:\n{facilities}")
    told = ""
    try:
        inspect_model(read_config(model), CausalLM().factory, "eager", 16)
    except InputError as error:
        told = str(error)
    datasets = dict.fromkeys(entries, DatasetAnswer(task="causal-lm", block_tokens=16))
    rows = check_stages(read_federation(path), datasets, model_figures(model))
    assert [row.subject for row in rows] == ["far", "near"] and bool(told) == (family != "bloom")
    expected = ("fail", told) if told else ("ok", rows[0].found)
    assert {(row.verdict, row.found) for row in rows} == {expected}
