"""Laws of a base held in 4 bits: peft's QLoRA steps, in every layout, and an update that any adapter's reader loads."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.report import read_report
from facility.exchange.messages.settings import TrainingSettings, check_differential
from facility.exchange.scheduling.policies import POLICIES
from facility.exchange.validation import parse_dataclass
from tests.cases import slow_but
from tests.pico import save_pico
from tests.training.adapter_step import check_step_is_pefts
from tests.training.family_trial import SAME
from tests.training.federation import largest_difference, weights, write_dataset
from tests.training.layouts import TWO, arguments, rounds_in

pytest.importorskip("bitsandbytes", reason="holds a base in 4 bits: pip install 'crossfed[quantized]'")

WIDE = {"hidden_size": 64, "intermediate_size": 128}
LORA: dict[str, Any] = {"rank": 4, "quantize_base": "nf4"}
KINDS: dict[str, dict[str, Any]] = {
    "nf4": LORA,
    "nf4, scales in 32 bits": LORA | {"double_quantization": False},
    "fp4 of some layers": LORA | {"quantize_base": "fp4", "targets": ["q_proj", "down_proj"]},
    "a head trained whole": LORA | {"modules_to_save": ["lm_head"]},
}


def pefts(model: Path, adapter: Path, lora: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """The same training as a user of peft begins it, with bitsandbytes' own layers."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=lora["quantize_base"],
        bnb_4bit_use_double_quant=lora.get("double_quantization", True),
        bnb_4bit_compute_dtype=dtype,
    )
    base = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, quantization_config=quantization, device_map="cpu")
    return PeftModel.from_pretrained(base, adapter, is_trainable=True)


@pytest.mark.parametrize("kind", slow_but(["nf4", "fp4 of some layers"], KINDS))
def test_a_step_is_pefts_qlora(tmp_path: Path, kind: str):
    lora = KINDS[kind]
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model", **WIDE)
    trained = check_step_is_pefts(tmp_path, dataset, model, lora, lambda one: pefts(model, one, lora), within=1e-5)
    assert any("lora_" in name for name in trained)


@pytest.mark.slow
def test_every_layout_trains_it_alike(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model", **WIDE)
    training = {"lora": LORA, "learning_rate": 1e-2, "epsilon": 1e-2}
    two = {name: arguments(tmp_path / name, model, dataset, **training, **one) for name, one in TWO.items()}
    two["recomputed"] = arguments(
        tmp_path / "recomputed", model, dataset, **training, layout={"activation_checkpointing": "full"}
    )
    rounds_in([("one", arguments(tmp_path / "one", model, dataset, **training))])
    rounds_in(list(two.items()), ranks=2)
    for name in two:
        assert largest_difference(tmp_path / "one/out", tmp_path / name / "out") < SAME, name
    full = arguments(tmp_path / "full", model, dataset, **training | {"lora": {"rank": 4}})
    rounds_in([("full", full)])
    assert largest_difference(tmp_path / "one/out", tmp_path / "full/out") > 1e-4


@pytest.mark.slow
def test_half_precision_quantises_what_peft_quantises(tmp_path: Path):
    """Two ranks share the base: its scales in 32 bits travel between them uncast."""
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model", dtype="bfloat16", **WIDE)
    for lora in (LORA, LORA | {"double_quantization": False}):
        place = tmp_path / str(len(lora))
        training = {"lora": lora, "compute_dtype": "bfloat16", "steps": 1}
        rounds_in([("two", arguments(place, model, dataset, **training))], ranks=2)
        theirs = pefts(model, place / "out", lora, torch.bfloat16).eval()
        ids = torch.from_numpy(_validation(dataset))
        with torch.no_grad():
            loss = theirs(input_ids=ids, labels=ids).loss.item()
        assert loss == pytest.approx(read_report(place / "out").loss_returned, abs=5e-3)


def _validation(dataset: Path) -> Any:
    import numpy as np

    return np.load(dataset / "validation.npy").astype(np.int64)


@pytest.mark.slow
def test_replicas_under_every_policy_train_it(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model", **WIDE)
    training = {"lora": LORA, "learning_rate": 1e-2, "layout": {"replicas": 2}}
    policies = sorted(POLICIES.built_in)
    cases = [(p, arguments(tmp_path / p, model, dataset, **training, sync={"policy": p})) for p in policies]
    rounds_in(cases, ranks=2)
    for policy in policies:
        report = read_report(tmp_path / policy / "out")
        assert report.loss_returned < report.loss_received, policy


@pytest.mark.slow
def test_a_paused_round_ends_as_an_uninterrupted_one(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model", **WIDE)
    rounds_in([("whole", arguments(tmp_path / "whole", model, dataset, lora=LORA))])
    stopping = {"lora": LORA, "limits": {"stop_after": 1}}
    rounds_in([("first", arguments(tmp_path / "paused", model, dataset, **stopping))], expect=85)
    rounds_in([("second", arguments(tmp_path / "paused", model, dataset, lora=LORA))])
    assert largest_difference(tmp_path / "whole/out", tmp_path / "paused/out") == 0


def test_the_update_is_that_of_plain_adapters(tmp_path: Path):
    """Names, shapes and configuration say nothing of the base's bits: facilities may differ in them."""
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model", **WIDE)
    for name, lora in (("bits", LORA), ("floats", {"rank": 4})):
        rounds_in([(name, arguments(tmp_path / name, model, dataset, lora=lora))])
    bits, floats = weights(tmp_path / "bits/out"), weights(tmp_path / "floats/out")
    assert {name: one.shape for name, one in bits.items()} == {name: one.shape for name, one in floats.items()}
    first, second = (json.loads((tmp_path / n / "out/adapter_config.json").read_text()) for n in ("bits", "floats"))
    assert first == second


@pytest.mark.parametrize(
    ("lora", "why"),
    [
        ({"quantize_base": "nf4"}, "lora.rank is 0 beside lora.quantize_base 'nf4'"),
        (LORA | {"dora": True}, "lora.dora is True beside"),
        (LORA | {"parameters": ["experts.down_proj"]}, "fused experts stay in float32"),
        (LORA | {"quantize_base": "int8"}, "expected one of 'none', 'nf4', 'fp4'|int8"),
    ],
)
def test_what_excludes_it_is_refused(lora: dict[str, Any], why: str):
    with pytest.raises(ConfigurationError, match=why):
        parse_dataclass(LoraSettings, lora)


def test_what_was_never_compared_is_refused():
    with pytest.raises(ConfigurationError, match="layout.compile is true beside lora.quantize_base"):
        parse_dataclass(TrainingSettings, {"lora": LORA, "layout": {"compile": True}})
    with pytest.raises(ConfigurationError, match="lora.quantize_base is 'nf4', expected none with privacy"):
        check_differential(parse_dataclass(TrainingSettings, {"lora": LORA, "layout": {"sharding": "NO_SHARD"}}))


@pytest.mark.parametrize(
    ("family", "changes", "why"),
    [
        ("llama", {}, "has 32 inputs, expected a multiple of 64"),
        ("gpt2", {}, "no layer in the blocks of this gpt2 model is a plain linear layer"),
    ],
)
def test_a_model_that_cannot_be_quantised_is_refused(tmp_path: Path, family: str, changes: dict[str, Any], why: str):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model", family, **changes)
    (said,) = rounds_in([("one", arguments(tmp_path / "one", model, dataset, lora=LORA))], expect=2)["one"]
    assert why in said


@pytest.mark.parametrize("version", ["", "0.49.2"])
def test_a_facility_without_the_package_is_told_how_to_get_it(version: str, tmp_path: Path, monkeypatch):
    """Before 0.50 it multiplies by the weight as it was not laid down."""
    installed = importlib.metadata.version

    def told(name: str) -> str:
        if name == "bitsandbytes" and not version:
            raise importlib.metadata.PackageNotFoundError(name)
        return version if name == "bitsandbytes" else installed(name)

    monkeypatch.setattr(importlib.metadata, "version", told)
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model", **WIDE)
    (said,) = rounds_in([("one", arguments(tmp_path / "one", model, dataset, lora=LORA))], expect=2)["one"]
    assert "pip install 'bitsandbytes>=0.5" in said and f"bitsandbytes {version or 'is not installed'}" in said
