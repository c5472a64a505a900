"""Laws of DoRA and of adapters of fused experts: peft's steps, in every layout, averaged and exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.aggregation.settings import AggregationSettings
from coordinator.models.adapter_export import export_adapter
from coordinator.models.adapter_import import import_adapter
from coordinator.publishing.publish import name_the_base
from facility.exchange.checkpoints.adapters import A, is_adapter, is_magnitude
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.report import read_report
from facility.exchange.validation import parse_dataclass
from facility.training.lora import inject_adapters
from tests.aggregation import make
from tests.aggregation.make import aggregate
from tests.cases import slow_but
from tests.pico import save_pico
from tests.training.adapter_step import check_step_is_pefts
from tests.training.families import save_tiny
from tests.training.family_trial import SAME
from tests.training.federation import largest_difference, weights, write_dataset, write_masked_words
from tests.training.images import save_image_model, write_images
from tests.training.layouts import arguments, rounds_in
from tests.training.test_tasks import save_classifier, write_classes

BOTH = ["experts.gate_up_proj", "experts.down_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("llama", {"rank": 4, "dora": True}),
    "dora of columns": ("gpt2", {"rank": 4, "dora": True, "rslora": True}),
    "fused experts": ("qwen3_moe", {"rank": 2, "parameters": BOTH}),
    "frozen A": ("llama", {"rank": 4, "freeze_a": True}),
    "frozen A of experts": ("qwen3_moe", {"rank": 2, "parameters": BOTH, "freeze_a": True}),
    "fused experts alone": ("mixtral", {"rank": 2, "parameters": BOTH[1:], "targets": ["q_proj"]}),
}


def validation_ids(dataset: Path) -> Any:
    return np.load(dataset / "validation.npy").astype(np.int64)


def made(directory: Path, family: str) -> Path:
    return save_pico(directory, family) if family in ("llama", "gpt2") else save_tiny(directory, family)


def loaded(model: Path, adapter: Path, *, freeze_a: bool = False) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    for name, parameter in found.named_parameters():
        if freeze_a and ".lora_A." in name:
            parameter.requires_grad_(False)
    return found


def named(words: list[str], facility: str) -> list[str]:
    """The same arguments, with settings that name another facility."""
    settings = Path(words[words.index("--settings") + 1])
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"facility": facility}))
    return words


@pytest.mark.parametrize("kind", slow_but(["dora", "fused experts", "frozen A", "frozen A of experts"], KINDS))
def test_a_step_from_received_adapters_is_pefts(tmp_path: Path, kind: str):
    family, lora = KINDS[kind]
    dataset, model = write_dataset(tmp_path / "data"), made(tmp_path / "model", family)
    frozen = bool(lora.get("freeze_a"))
    check_step_is_pefts(
        tmp_path, dataset, model, lora, lambda adapter: loaded(model, adapter, freeze_a=frozen), within=SAME
    )
    received, returned = weights(tmp_path / "received"), weights(tmp_path / "r1/out")
    same = {name for name, one in returned.items() if one.equal(received[name])}
    assert same == ({name for name in returned if A in name} if frozen else set())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora", "fused experts", "frozen A"])
def test_every_layout_trains_them_alike(tmp_path: Path, kind: str):
    family, lora = KINDS[kind]
    dataset, model = write_dataset(tmp_path / "data"), made(tmp_path / "model", family)
    training = {"lora": lora, "learning_rate": 1e-2, "epsilon": 1e-2}
    rounds_in([("one", arguments(tmp_path / "one", model, dataset, **training))])
    two = {"sharded": {}, "replicas": {"layout": {"sharding": "NO_SHARD"}}, "stages": {"layout": {"stages": 2}}}
    rounds_in(
        [(n, arguments(tmp_path / n, model, dataset, **training, **layout)) for n, layout in two.items()], ranks=2
    )
    for name in two:
        assert largest_difference(tmp_path / "one/out", tmp_path / name / "out") < SAME, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dora", "dora of columns", "fused experts"])
def test_their_mean_goes_on_and_loads_with_peft(tmp_path: Path, kind: str):
    family, lora = KINDS[kind]
    dataset, model = write_dataset(tmp_path / "data"), made(tmp_path / "model", family)
    other = write_dataset(tmp_path / "other", seed=1)
    rounds_in(
        [
            (name, named(arguments(tmp_path / name, model, data, lora=lora, learning_rate=1e-2), name))
            for name, data in (("north", dataset), ("south", other))
        ]
    )
    updates = {name: tmp_path / name / "out" for name in ("north", "south")}
    told = parse_dataclass(LoraSettings, lora)
    settings = AggregationSettings(rule="mean", weights="equal", **make.UNBOUNDED)
    aggregate(base=model, updates=[*updates.values()], out=tmp_path / "next", settings=settings, adapters=told)
    first, second, mean = (weights(one) for one in (*updates.values(), tmp_path / "next"))
    for name in first:
        torch.testing.assert_close(mean[name], (first[name] + second[name]) / 2)
    assert any(map(is_magnitude, first)) == told.dora
    rounds_in([("r1", arguments(tmp_path / "r1", tmp_path / "next", dataset, round=1, lora=lora))])
    export_adapter(tmp_path / "next", base=model, out=tmp_path / "adapter")
    ids = torch.from_numpy(validation_ids(dataset))
    with torch.no_grad():
        loss = loaded(model, tmp_path / "adapter").eval()(input_ids=ids, labels=ids).loss.item()
    assert loss == pytest.approx(read_report(tmp_path / "r1/out").loss_received, abs=1e-5)


def material(task: str, place: Path) -> tuple[Path, Path]:
    """A dataset of that task and a base model for it."""
    if task == "SEQ_CLS":
        return write_classes(place / "data"), save_classifier(place / "model", 2, "llama")
    if task == "BertForMaskedLM":
        return write_masked_words(place / "data"), save_pico(place / "model", "bert")
    if task == "ViTForImageClassification":
        return write_images(place / "data"), save_image_model(place / "model", "vit")
    return write_dataset(place / "data"), save_pico(place / "model", "gpt2")


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_CLS", "BertForMaskedLM", "ViTForImageClassification"])
def test_pefts_classes_that_find_the_base_by_themselves_load_all_that_is_given_out(tmp_path: Path, task: str):
    """They refused it: no file of ours said what task the adapters are for, but for the export of some models."""
    import peft

    dataset, model = material(task, tmp_path)
    lora = {"rank": 2} | ({"targets": ["q_proj"]} if task.startswith("ViT") else {})
    rounds_in([("one", arguments(tmp_path, model, dataset, lora=lora, learning_rate=1e-2))])
    settings = AggregationSettings(rule="mean", weights="equal", **make.UNBOUNDED)
    aggregate(base=model, updates=[tmp_path / "out"], out=tmp_path / "next", settings=settings)
    export_adapter(tmp_path / "next", base=model, out=tmp_path / "exported")
    import_adapter(tmp_path / "exported", base=model, out=tmp_path / "imported")
    shutil.copytree(tmp_path / "next", tmp_path / "published")
    file = tmp_path / "published" / "adapter_config.json"
    told = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in told.items() if k not in ("task_type", "auto_mapping")}))
    name_the_base(tmp_path / "published", str(model))
    kinds = {"CAUSAL_LM": "AutoPeftModelForCausalLM", "SEQ_CLS": "AutoPeftModelForSequenceClassification"}
    loader = getattr(peft, kinds.get(task, "AutoPeftModel"))
    for place in ("out", "next", "exported", "imported", "published"):
        file = tmp_path / place / "adapter_config.json"
        told = json.loads(file.read_text())
        assert told.get("task_type", told.get("auto_mapping", {}).get("base_model_class")) == task, place
        file.write_text(json.dumps(told | {"base_model_name_or_path": str(model)}))
        found = peft.get_peft_model_state_dict(loader.from_pretrained(tmp_path / place))
        sent = {name: one for name, one in weights(tmp_path / place).items() if is_adapter(name)}
        assert found.keys() == sent.keys(), place
        assert all(found[name].equal(one) for name, one in sent.items()), place


@pytest.mark.parametrize(
    ("lora", "why"),
    [
        ({"rank": 2, "parameters": BOTH, "dora": True}, "lora.dora is True beside lora.parameters"),
        ({"rank": 2, "parameters": BOTH, "dropout": 0.1}, "lora.dropout is 0.1 beside"),
        ({"rank": 2, "parameters": ["experts"]}, "such as 'experts.down_proj'"),
    ],
)
def test_what_peft_cannot_do_is_refused(lora: dict[str, Any], why: str):
    with pytest.raises(ConfigurationError, match=why):
        parse_dataclass(LoraSettings, lora)


def test_experts_that_a_model_does_not_have_are_refused(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    lora = {"rank": 2, "parameters": BOTH}
    (said,) = rounds_in([("one", arguments(tmp_path / "one", model, dataset, lora=lora))], expect=2)["one"]
    assert "fits no fused experts of the model; it has none" in said


def injected(**settings: Any) -> Any:
    """A tied model of one block with adapters."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=32, tie_word_embeddings=True, **sizes))
    model.tie_weights()
    inject_adapters(model, parse_dataclass(LoraSettings, {"rank": 2} | settings), classifies=False)
    return model


@pytest.mark.parametrize("odd", ["lm_head", "embed_tokens", "q_pro", "proj"])
def test_a_target_that_fits_nothing_is_named_beside_others_that_fit(odd: str):
    """peft adapts those that fit and says nothing of the rest."""
    with pytest.raises(ConfigurationError, match=rf"name \['{odd}'\], which fit no linear layer .*modules_to_save"):
        injected(targets=["q_proj", odd])
    names = [name for name, _ in injected(targets=["q_proj"]).named_parameters() if ".lora_" in name]
    adapted = {name.partition(".lora_")[0] for name in names}
    assert adapted == {"model.layers.0.self_attn.q_proj"}


def test_a_tied_head_is_refused_with_the_module_to_name_instead():
    with pytest.raises(ConfigurationError, match="'lm_head'.*model.embed_tokens.*name 'embed_tokens' instead"):
        injected(modules_to_save=["lm_head"])
    with pytest.raises(ConfigurationError, match="'nothing', which is not a module"):
        injected(modules_to_save=["nothing"])
    assert injected(modules_to_save=["embed_tokens"]).model.embed_tokens.weight.requires_grad
