"""`crossfed check` refuses adapters that the jobs would refuse, in their words, and no others."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from coordinator.config.federation import read_federation
from coordinator.preflight import fitting
from coordinator.preflight.coordinator import failing_here
from coordinator.preflight.fitting import check_fitting
from facility.exchange.checkpoints import conversion
from facility.exchange.checkpoints.task_class import model_of
from facility.exchange.errors import CrossFedError
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.validation import parse_dataclass
from facility.training.lora import inject_adapters
from facility.training.model import Attention, build_base_model, read_config
from tests.pico import save_pico
from tests.training.families import save_tiny

MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": save_pico,
    "gpt2": partial(save_pico, family="gpt2"),
    **{family: partial(save_tiny, family=family) for family in ("qwen3_moe", "laguna", "mamba")},
}


def described(folder: Path, model: Path, lora: dict[str, Any], aggregation: str = "") -> Any:
    """A federation of one facility that trains adapters of the model."""
    path = folder / "federation.yml"
    path.write_text(
        f"name: f\nmodel: {model}\nrounds: 1\ntraining: {{steps: 1, lora: {json.dumps({'rank': 2} | lora)}}}\n"
        f"facilities:\n  - {{name: far, dataset: d}}\n{aggregation}"
    )
    return read_federation(path)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: save(folder / name) for name, save in MODELS.items()}


def add_adapters(model: Path, lora: dict[str, Any]) -> None:
    """Add the adapters as the trainer does, to the model that it builds."""
    skeleton = build_base_model(
        read_config(model), AutoModelForCausalLM, Attention(name="eager", reason="on the meta device")
    )
    inject_adapters(skeleton, parse_dataclass(LoraSettings, {"rank": 2} | lora), classifies=False)


@pytest.mark.parametrize(
    ("name", "lora", "word"),
    [
        ("llama", {"targets": ["q_proj", "lm_head"]}, "['lm_head']"),
        ("llama", {"targets": ["q_pro"]}, "['q_pro']"),
        ("llama", {"targets": ["q_proj", "input_layernorm"]}, "['input_layernorm']"),
        ("llama", {"targets": ["self_attn"]}, "['self_attn']"),
        ("llama", {"targets": ["all-linear"]}, "['all-linear']"),
        ("llama", {"targets": [".*_proj"]}, "['.*_proj']"),
        ("llama", {"parameters": ["experts.down_proj"]}, "fits no fused experts"),
        ("gpt2", {"targets": ["c_attn", "q_proj"]}, "['q_proj']"),
        ("qwen3_moe", {"targets": ["q_proj", "gate_proj"]}, "for its fused experts"),
        ("qwen3_moe", {"parameters": ["experts.down_pro"]}, "fits no fused experts"),
        ("laguna", {"targets": ["shared_experts.up_proj"]}, "could not load"),
        ("mamba", {"targets": ["x_proj", "out_proj"]}, "would do nothing"),
        ("mamba", {"targets": ["norm"]}, "['norm']"),
    ],
)
def test_targets_that_fit_nothing_are_told_before_a_job_in_the_words_of_the_job(
    tmp_path: Path, models: dict[str, Path], name: str, lora: dict[str, Any], word: str
):
    with pytest.raises(CrossFedError) as refused:
        add_adapters(models[name], lora)
    federation = described(tmp_path, models[name], lora)
    (row,) = failing_here(federation)
    assert (row.subject, row.check, row.found) == ("far", "adapters", str(refused.value)) and word in row.found
    assert row in check_fitting(federation)


@pytest.mark.parametrize(
    "lora", [{"modules_to_save": ["lm_haed"]}, {"targets": ["q_proj"], "modules_to_save": ["q_proj"]}]
)
def test_modules_that_are_not_there_or_are_adapted_are_told_before_a_job_in_the_words_of_the_job(
    tmp_path: Path, models: dict[str, Path], lora: dict[str, Any]
):
    with pytest.raises(CrossFedError) as refused:
        add_adapters(models["llama"], lora)
    (row,) = failing_here(described(tmp_path, models["llama"], lora))
    assert (row.subject, row.found) == ("far", str(refused.value)) and "is not a module of it" in row.found


@pytest.mark.parametrize(
    ("patterns", "odd"),
    [
        ("exclude: ['*lora_B*']", ".lora_B.weight"),
        ("include: ['*lora_A*', '*lm_head*']", ".lora_B.weight"),
        ("exclude: ['*layers.0*']", "layers.0.self_attn.q_proj.lora_A.weight"),
        ("exclude: ['*lm_head*']", "base_model.model.lm_head.weight"),
        ("exclude: ['model.*', 'lm_head*']", ""),
        ("include: ['base_model.*']", ""),
    ],
)
def test_patterns_that_keep_a_part_of_an_adapter_at_home_are_told_before_a_job(
    tmp_path: Path, models: dict[str, Path], patterns: str, odd: str
):
    """No update without a part of its adapters is taken, and none is begun from a model without them."""
    lora = {"targets": ["q_proj"], "modules_to_save": ["lm_head"]}
    told = failing_here(described(tmp_path, models["llama"], lora, f"aggregation: {{{patterns}}}\n"))
    assert [row.check for row in told] == (["adapters"] if odd else [])
    assert not odd or odd in told[0].found


BELOW = "encoder.layer.1.attention.self.query"
"""A layer of a bare `BertModel`."""


@pytest.mark.parametrize(
    ("task", "target", "taken"),
    [("masked-lm", "bert." + BELOW, True), ("masked-lm", BELOW + ".x", False), (None, "bert." + BELOW, True)],
)
def test_targets_are_looked_for_in_the_class_that_the_job_builds(
    tmp_path: Path, task: str | None, target: str, taken: bool
):
    """config.json names a bare model, whose layers have other full names than those of the model with its head."""
    model = save_pico(tmp_path / "model", "bert")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    if task:
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "dataset.json").write_text(json.dumps({"task": task}))
    federation = described(tmp_path, model, {"targets": [target]})
    assert (failing_here(federation) == []) == taken
    verdicts = {row.check: row.verdict for row in check_fitting(federation)}
    assert verdicts["tensor names"] == ("ok" if task else "skipped")
    skeleton = build_base_model(
        read_config(model), AutoModelForMaskedLM, Attention(name="eager", reason="on the meta device")
    )
    settings = parse_dataclass(LoraSettings, {"rank": 2, "targets": [target]})
    if taken:
        inject_adapters(skeleton, settings, classifies=False)
    else:
        with pytest.raises(CrossFedError):
            inject_adapters(skeleton, settings, classifies=False)


def test_a_model_without_the_head_of_the_datasets_task_is_told_before_a_job(tmp_path: Path, models: dict[str, Path]):
    """A facility's answer counts as what is on this machine does; without adapters, too."""
    federation = described(tmp_path, models["llama"], {"rank": 0})
    assert failing_here(federation) == []
    told = [row for row in check_fitting(federation, {"far": "classification"}) if row.verdict == "fail"]
    assert len(told) == 1 and "'score.weight'" in told[0].found and "--classes" in told[0].fix
    none = [row for row in check_fitting(federation, {"far": "image-classification"}) if row.verdict == "fail"]
    assert len(none) == 1 and "transformers has none for the task image-classification" in none[0].found


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        *((name, {}) for name in MODELS),
        ("llama", {"targets": ["q_proj", "self_attn.v_proj"]}),
        ("llama", {"targets": ["model.layers.1.mlp.up_proj"], "modules_to_save": ["lm_head"]}),
        ("llama", {"rank": 0, "targets": ["nothing"], "modules_to_save": ["nothing"]}),
        ("gpt2", {"targets": ["c_attn"]}),
        ("qwen3_moe", {"targets": ["q_proj"], "parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
        ("mamba", {"targets": ["x_proj", "in_proj"]}),
    ],
)
def test_what_the_job_takes_is_not_refused_before(
    tmp_path: Path, models: dict[str, Path], name: str, lora: dict[str, Any]
):
    if lora.get("rank", 2):
        add_adapters(models[name], lora)
    assert failing_here(described(tmp_path, models[name], lora)) == []


def test_the_model_is_built_once_for_names_ties_and_targets(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
):
    built = []

    def counted(directory: Path, task: Any = None) -> Any:
        built.append(directory)
        return model_of(directory, task)

    for module in (fitting, conversion):
        monkeypatch.setattr(module, "model_of", counted)
    lora = {"targets": ["q_proj"], "modules_to_save": ["lm_head"]}
    assert failing_here(described(tmp_path, models["llama"], lora)) == []
    assert len(built) == 1


@pytest.mark.parametrize(("absent", "row"), [("transformers", "tensor names"), ("peft", "adapters")])
def test_without_a_library_the_check_is_skipped_and_the_run_not_refused(
    tmp_path: Path, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, absent: str, row: str
):
    for name in [name for name in sys.modules if name.partition(".")[0] == absent]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, absent, None)
    federation = described(tmp_path, models["llama"], {"targets": ["nothing"]})
    assert failing_here(federation) == []
    (told,) = [one for one in check_fitting(federation) if one.verdict == "skipped"]
    assert told.check == row and absent in told.found
