"""The call that a finished run shows loads the model it names."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from coordinator.engine.how_to_load import how_to_load
from tests.aggregation.test_adapter_export import round_model
from tests.pico import save_pico
from tests.training.families import save_tiny
from tests.training.images import save_image_model


@pytest.mark.parametrize(
    "factory", ["AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSequenceClassification"]
)
def test_the_class_is_that_of_the_model(tmp_path: Path, factory: str):
    family = "llama" if factory == "AutoModelForCausalLM" else "bert"
    model = save_tiny(tmp_path / "model", family, factory=factory)
    name, call = how_to_load(model).split(".")
    assert name == factory
    named = json.loads((model / "config.json").read_text())["architectures"]
    assert [type(getattr(getattr(transformers, name), call)(model)).__name__] == named


def test_an_image_classifier_is_no_language_model(tmp_path: Path):
    save_image_model(tmp_path / "model", "resnet")
    assert how_to_load(tmp_path / "model") == "AutoModelForImageClassification.from_pretrained"


@pytest.mark.slow
def test_adapters_are_exported_by_the_command_that_is_shown(tmp_path: Path):
    base = save_pico(tmp_path / "base", "llama")
    round_model(tmp_path / "round", base, "llama", whole=False)
    shown = how_to_load(tmp_path / "round", base=str(base))
    words = shlex.split(shown.removeprefix("adapters: ").replace("DIR", str(tmp_path / "out")))
    done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_a_model_that_cannot_be_read_is_said_to_be_what_most_are(tmp_path: Path):
    assert how_to_load(tmp_path) == "AutoModelForCausalLM.from_pretrained"
