"""A federation may begin with a published adapter: the trainer goes on from it, and other kinds are refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from coordinator.models.adapter_export import load_base
from coordinator.models.adapter_import import import_adapter
from coordinator.models.published import load_published
from facility.dataset import open_dataset
from facility.exchange.errors import InputError
from facility.exchange.messages.report import read_report
from tests.pico import save_pico
from tests.training.families import save_tiny
from tests.training.federation import write_dataset
from tests.training.layouts import arguments, rounds_in

TARGETS = ["q_proj", "down_proj"]
LORA = {"rank": 2, "alpha": 8.0, "targets": TARGETS}


BOTH = ["experts.gate_up_proj", "experts.down_proj"]
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dora": ("llama", {"use_dora": True}, LORA | {"dora": True}),
    "dora of columns": (
        "gpt2",
        {"use_dora": True, "use_rslora": True, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True},
        LORA | {"dora": True, "rslora": True, "targets": ["c_attn", "c_fc"]},
    ),
    "fused experts": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": BOTH},
        LORA | {"targets": ["q_proj"], "parameters": BOTH},
    ),
    "fused experts alone": (
        "mixtral",
        {"target_modules": ["q_proj"], "target_parameters": BOTH[1:]},
        LORA | {"targets": ["q_proj"], "parameters": BOTH[1:]},
    ),
    "some blocks": (
        "llama",
        {"layers_to_transform": [2, 3]},
        LORA | {"targets": [f"model.layers.{n}.{of}" for n in (2, 3) for of in ("self_attn.q_proj", "mlp.down_proj")]},
    ),
    "a head trained whole": ("llama", {"modules_to_save": ["lm_head"]}, LORA | {"modules_to_save": ["lm_head"]}),
}
"""Family, what its publisher asked peft for, and the settings that go on from it."""


def published(directory: Path, base: Path, **changes: Any) -> Path:
    """An adapter as `peft` saves it, every number of it drawn."""
    torch.manual_seed(3)
    settings = LoraConfig(**({"r": 2, "lora_alpha": 8, "target_modules": TARGETS} | changes))
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    for name, parameter in adapted.named_parameters():
        if ".lora_A" in name or ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(directory)
    return directory


def test_the_first_round_goes_on_from_a_published_adapter(tmp_path: Path):
    base, dataset = save_pico(tmp_path / "base"), write_dataset(tmp_path / "data")
    adapter = published(tmp_path / "adapter", base)
    told = import_adapter(adapter, base=base, out=tmp_path / "model")
    assert json.loads(told.partition("lora: ")[2]) == LORA | {"targets": sorted(TARGETS)}
    rounds_in([("one", arguments(tmp_path / "one", tmp_path / "model", dataset, lora=LORA))])
    report = read_report(tmp_path / "one" / "out")
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    ids = torch.from_numpy(open_dataset(dataset).split("validation")[:].astype("int64"))
    with torch.no_grad():
        assert report.loss_received == pytest.approx(expected(input_ids=ids, labels=ids).loss.item(), abs=1e-5)
    assert report.loss_returned < report.loss_received


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"targets": [*TARGETS, "v_proj"]}, r"holds adapters, but none for .*v_proj"),
        (
            {"targets": ["q_proj"]},
            r"holds adapters, and '\S+down_proj\S+' \(\d+ in all\) is none that training.lora asks",
        ),
        ({"alpha": 16.0}, "holds adapters of alpha 8, and training.lora.alpha is 16, so that another model"),
        ({"rslora": True}, r"of alpha 8, and training.lora.alpha is 8 with rslora.* by 4 there and by 5.66 here"),
    ],
)
def test_another_model_than_was_received_is_not_trained(tmp_path: Path, changes: dict[str, Any], reason: str):
    """Adapters that the settings do not name would be left out, and others count more or less than they did."""
    base, dataset = save_pico(tmp_path / "base"), write_dataset(tmp_path / "data")
    import_adapter(published(tmp_path / "adapter", base), base=base, out=tmp_path / "model")
    (said,) = rounds_in(
        [("one", arguments(tmp_path / "one", tmp_path / "model", dataset, lora=LORA | changes))], expect=2
    )["one"]
    assert re.search(reason, said)


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_kind_that_peft_saves_goes_on(tmp_path: Path, kind: str):
    family, changes, lora = KINDS[kind]
    base = save_pico(tmp_path / "base", family) if family in ("llama", "gpt2") else save_tiny(tmp_path / "base", family)
    adapter = published(tmp_path / "adapter", base, **changes)
    told = json.loads(import_adapter(adapter, base=base, out=tmp_path / "model").partition("lora: ")[2])
    listed = {name: sorted(one) if isinstance(one, list) else one for name, one in lora.items()}
    assert {name: sorted(one) if isinstance(one, list) else one for name, one in told.items()} == listed
    dataset = write_dataset(tmp_path / "data")
    more = {"lora": told, "learning_rate": 1e-2}
    rounds_in([("one", arguments(tmp_path / "one", tmp_path / "model", dataset, **more))])
    report = read_report(tmp_path / "one" / "out")
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = PeftModel.from_pretrained(loaded, adapter).eval()
    ids = torch.from_numpy(open_dataset(dataset).split("validation")[:].astype("int64"))
    with torch.no_grad():
        assert report.loss_received == pytest.approx(expected(input_ids=ids, labels=ids).loss.item(), abs=1e-5)
    assert report.loss_returned < report.loss_received
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "one/out")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rank_pattern": {"q_proj": 3}}, "several ranks"),
        ({"alpha_pattern": {"q_proj": 3}}, "several scales"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"alora_invocation_tokens": [5], "task_type": "CAUSAL_LM"}, "begins to count at certain tokens"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, r"embed_tokens\.lora_embedding_A.*which no facility trains"),
        ({"target_modules": ["q_proj", "lm_head"]}, r"no federation can go on.*\['lm_head'\].*modules_to_save"),
    ],
)
def test_adapters_of_another_kind_are_refused_with_the_reason(tmp_path: Path, changes: dict[str, Any], reason: str):
    base = save_pico(tmp_path / "base")
    adapter = published(tmp_path / "adapter", base, **changes)
    with pytest.raises(InputError, match=reason):
        import_adapter(adapter, base=base, out=tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_an_adapter_of_another_model_is_refused(tmp_path: Path):
    base, other = save_pico(tmp_path / "base"), save_pico(tmp_path / "other", hidden_size=16, intermediate_size=32)
    with pytest.raises(InputError, match="do not fit the base model"):
        import_adapter(published(tmp_path / "adapter", base), base=other, out=tmp_path / "model")
    with pytest.raises(InputError, match="holds adapters already"):
        model = import_adapter(tmp_path / "adapter", base=base, out=tmp_path / "model") and tmp_path / "model"
        import_adapter(tmp_path / "adapter", base=model, out=tmp_path / "again")


def test_a_module_that_an_adapter_names_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """peft imports what megatron_core names, from the folder that the command is called in as well."""
    base = save_pico(tmp_path / "base")
    adapter = published(tmp_path / "adapter", base)
    (adapter / "megatron").mkdir()
    (adapter / "megatron" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    file = adapter / "adapter_config.json"
    sound = json.loads(file.read_text())
    file.write_text(json.dumps(sound | {"megatron_config": {"x": 1}, "megatron_core": "megatron.evil"}))
    monkeypatch.syspath_prepend(str(adapter))
    with pytest.raises(InputError, match="an adapter of Megatron's layers"):
        import_adapter(adapter, base=base, out=tmp_path / "model")
    monkeypatch.setattr("coordinator.models.adapter_import.refuse_other_kinds", lambda adapter: None)
    import_adapter(adapter, base=base, out=tmp_path / "model")
    assert "megatron" not in (tmp_path / "model" / "adapter_config.json").read_text()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("config", ["of the model", "none"])
def test_no_published_model_brings_an_adapter_that_names_what_else_is_loaded(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """transformers loads it unasked: peft imports a module that it names, or another model is taken for the source."""
    model = save_pico(tmp_path / "model")
    adapter = published(tmp_path / "adapter", model)
    sound = json.loads((adapter / "adapter_config.json").read_text())
    named = {"megatron_config": {"x": 1}, "megatron_core": "megatron.evil", "base_model_name_or_path": str(model)}
    place = model if config == "of the model" else tmp_path / "another"
    (place / "megatron").mkdir(parents=True)
    (place / "megatron" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()")
    (place / "adapter_config.json").write_text(json.dumps(sound | named))
    (adapter / "adapter_model.safetensors").rename(place / "adapter_model.safetensors")
    monkeypatch.syspath_prepend(str(place))
    with pytest.raises(InputError, match=r"holds adapter_config\.json.*--import-adapter"):
        load_published(AutoModelForCausalLM, str(place), kind="a model", dtype="float32", revision="main")
    with pytest.raises(InputError, match="holds adapters already"):
        load_base(place)
    assert not (tmp_path / "ran").exists()


def test_an_import_takes_nothing_that_would_be_executed_and_follows_no_link_out_of_the_download(tmp_path: Path):
    base = save_pico(tmp_path / "models--o--n" / "snapshots" / "revision")
    adapter = published(tmp_path / "adapter", base)
    for name in ("modeling.py", "pytorch_model.bin"):
        (base / name).write_bytes(b"code")
    blob = tmp_path / "models--o--n" / "blobs" / "0f"
    blob.parent.mkdir()
    (base / "config.json").rename(blob)
    (base / "config.json").symlink_to("../../blobs/0f")
    import_adapter(adapter, base=base, out=tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert "config.json" in names and not {"modeling.py", "pytorch_model.bin"} & names
    secret = tmp_path / "id_ed25519"
    secret.write_text("private")
    (base / "additional_chat_templates").mkdir()
    for link in (base / "notes.txt", adapter / "notes.txt", base / "additional_chat_templates" / "a.jinja"):
        link.symlink_to(secret)
        with pytest.raises(InputError, match="is a link to"):
            import_adapter(adapter, base=base, out=tmp_path / "other")
        link.unlink()
    assert not (tmp_path / "other").exists()
