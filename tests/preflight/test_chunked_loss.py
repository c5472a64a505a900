"""`crossfed check` refuses chunks of a loss that a model's output layer cannot compute, in the words of the job."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from coordinator.config.federation import Federation, read_federation
from coordinator.preflight.coordinator import failing_here
from coordinator.preflight.fitting import check_fitting
from coordinator.preflight.row import Row
from facility.exchange.checkpoints.task_class import FACTORIES
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.settings import TrainingSettings
from facility.training.head import choose_head
from facility.training.model import read_config
from tests.pico import save_pico
from tests.training.families import save_tiny
from tests.training.test_tasks import save_classifier


def save(directory: Path, task: str, family: str) -> Path:
    if task == "classification":
        return save_classifier(directory, 1, family)
    return save_tiny(directory, family) if family == "mamba" else save_pico(directory, family)


def described(folder: Path, model: Path, more: str = "") -> Federation:
    """Two facilities, the first of which demands chunks."""
    path = folder / "federation.yml"
    path.write_text(
        f"name: f\nmodel: {model}\nrounds: 1\ntraining: {{steps: 1, chunked_loss: always}}\n{more}"
        "facilities:\n  - {name: far, dataset: d}\n  - {name: own, dataset: d, training: {chunked_loss: auto}}\n"
    )
    return read_federation(path)


def chunk_rows(federation: Federation, task: str) -> list[Row]:
    return [row for row in check_fitting(federation, {"far": task, "own": task}) if row.check == "chunked loss"]


@pytest.mark.parametrize(
    ("task", "family", "obstacle"),
    [
        ("causal-lm", "gpt2", ""),
        ("masked-lm", "bert", ""),
        ("causal-lm", "mamba", "MambaForCausalLM changes its logits after the output layer"),
        ("classification", "llama", "LlamaForSequenceClassification has no linear output layer"),
    ],
)
def test_chunks_that_a_model_does_not_allow_are_told_before_a_job(
    tmp_path: Path, task: str, family: str, obstacle: str
):
    model = save(tmp_path / "model", task, family)
    said = ""
    try:
        choose_head(
            TrainingSettings(chunked_loss="always"),
            read_config(model),
            getattr(transformers, FACTORIES[task]),  # type: ignore[index]
            "eager",
            sequences=1,
            tokens=16,
            device="cpu",
        )
    except ConfigurationError as error:
        said = str(error)
    assert (obstacle in said) if obstacle else not said
    federation = described(tmp_path, model)
    rows = chunk_rows(federation, task)
    assert [(row.subject, f"{row.found}; {row.fix}") for row in rows] == ([("far", said)] if obstacle else [])
    if obstacle and task == "causal-lm":
        assert rows[0] in failing_here(federation)


@pytest.mark.parametrize(
    ("task", "more"),
    [
        ("preference", ""),
        ("causal-lm", "privacy: {differential: {epsilon: 8, delta: 1.0e-5, unit: block}}\n"),
        ("causal-lm", "trainer: {module: theirs}\n"),
    ],
    ids=["pairs", "noise", "a trainer of one's own"],
)
def test_nothing_is_told_where_no_job_would_compute_its_loss_in_chunks(tmp_path: Path, task: str, more: str):
    assert not chunk_rows(described(tmp_path, save(tmp_path / "model", task, "mamba"), more), task)
