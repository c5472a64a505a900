"""Laws: initial text models of every kind are made, tried, and given the classes that facilities prepare for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from coordinator.archive.rounds import Archive
from coordinator.model import convert_model
from coordinator.models.adapter_export import load_base, write_merged
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.companions import copy_companions
from facility.exchange.checkpoints.task_class import model_of
from facility.exchange.errors import CrossFedError, InputError
from facility.training.model import Attention, build_base_model, read_config
from tests.cases import slow_but
from tests.distributed import Started
from tests.pico import pico_config, save_pico
from tests.preparing.chats import save_chat_tokenizer

FACTORIES = {
    "masked": ("bert", transformers.AutoModelForMaskedLM),
    "classifier": ("llama", transformers.AutoModelForSequenceClassification),
    "encoder": ("bert", transformers.AutoModelForSequenceClassification),
}
CLASSES = ["it", "de", "fr"]


def made(source: Path, out: Path, **more: object) -> str:
    return convert_model(str(source), out, **({"dtype": "float32", "revision": "main"} | more))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", list(FACTORIES))
def test_a_model_stays_what_its_configuration_names(tmp_path: Path, kind: str):
    family, factory = FACTORIES[kind]
    torch.manual_seed(0)
    factory.from_config(pico_config(family, num_labels=3, pad_token_id=0)).save_pretrained(tmp_path / "source")
    told = made(tmp_path / "source", tmp_path / "out")
    assert "loaded and evaluated" in told and "new head" not in told
    given, found = open_checkpoint(tmp_path / "source"), open_checkpoint(tmp_path / "out")
    assert given.tensors.keys() == found.tensors.keys()
    assert all(given.read(name).equal(found.read(name)) for name in given.tensors)


@pytest.mark.parametrize("problem", ["multi_label_classification", "regression"])
def test_a_head_that_names_no_class_of_several_is_refused_or_becomes_one(tmp_path: Path, problem: str):
    """What reads a published model goes by problem_type: it would take the sigmoid of what was trained as softmax."""
    config = pico_config("bert", num_labels=3, pad_token_id=0, problem_type=problem)
    transformers.AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "source")
    with pytest.raises(InputError, match=f"{problem}.*give --classes"):
        made(tmp_path / "source", tmp_path / "refused")
    assert "loaded and evaluated" in made(tmp_path / "source", tmp_path / "out", classes=CLASSES)
    assert transformers.AutoConfig.from_pretrained(tmp_path / "out").problem_type == "single_label_classification"


def test_a_kernel_of_the_hub_that_a_configuration_names_is_code_and_not_fetched(tmp_path: Path):
    """transformers loads it wherever the caller names no attention of its own."""
    source = save_pico(tmp_path / "source", "llama")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"attn_implementation": "kernels-community/flash-attn2"}))
    with pytest.raises(ImportError, match="kernels"):
        transformers.AutoModelForCausalLM.from_pretrained(source)
    assert "every tensor has its place" in made(source, tmp_path / "out")
    assert "kernels-community" not in (tmp_path / "out" / "config.json").read_text()
    assert model_of(source).config._attn_implementation == "eager"
    assert load_base(source).config._attn_implementation == "eager"


ODD = {
    "no integer": {"num_attention_heads": "four"},
    "a negative size": {"hidden_size": -4},
    "a size beyond all memory": {"hidden_size": 10**12},
    "unknown positions": {"rope_parameters": {"rope_type": "nonsense"}},
    "an unknown activation": {"hidden_act": "nonsense"},
    "an unknown dtype": {"dtype": "float7"},
}


@pytest.mark.parametrize(
    "odd", [{"num_hidden_layers": 10**9}, {"num_hidden_layers": -1}, {"text_config": {"n_layer": 10_001}}]
)
def test_layers_without_end_are_refused_before_one_of_them_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, odd: dict[str, Any]
):
    """transformers makes all of them, for hours and in gigabytes, before it looks at the weights."""
    source = save_pico(tmp_path / "source", num_hidden_layers=1)
    changed = json.loads((source / "config.json").read_text()) | odd
    (source / "config.json").write_text(json.dumps(changed))
    monkeypatch.setattr("coordinator.model.kind_of", lambda *_: pytest.fail("it went on to load the model"))
    with pytest.raises(InputError, match="source has .*: .*, expected 0 to 10,000"):
        convert_model(str(source), tmp_path / "out", dtype="bfloat16", revision="main")
    with pytest.raises(CrossFedError, match="source/config.json has .*, expected 0 to 10,000"):
        read_config(source)


def test_architectures_that_are_no_names_are_one_error(tmp_path: Path):
    source = save_pico(tmp_path / "source", num_hidden_layers=1)
    changed = json.loads((source / "config.json").read_text()) | {"architectures": 4}
    (source / "config.json").write_text(json.dumps(changed))
    with pytest.raises(InputError, match="source cannot be used: TypeError.*; expected a config.json that fits"):
        convert_model(str(source), tmp_path / "out", dtype="bfloat16", revision="main")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("odd", ODD)
def test_a_configuration_that_fits_no_model_is_one_error_wherever_it_is_read(tmp_path: Path, odd: str):
    """At the coordinator it is given by hand, at a facility it comes from another machine."""
    source = save_pico(tmp_path / "source", num_hidden_layers=1)
    changed = json.loads((source / "config.json").read_text()) | ODD[odd]
    (source / "config.json").write_text(json.dumps(changed))
    with pytest.raises(
        InputError, match="source: .* expected a config.json that fits|is not a causal|source cannot be"
    ):
        convert_model(str(source), tmp_path / "out", dtype="bfloat16", revision="main")
    assert not (tmp_path / "out").exists()
    for use in (built, model_of)[: 1 if odd == "a size beyond all memory" else 2]:  # the last takes no memory
        with pytest.raises(CrossFedError, match="cannot (be used|build)"):
            use(source)


def built(source: Path) -> object:
    """As a facility's job builds the model that it received."""
    attention = Attention(name="eager", reason="")
    return build_base_model(read_config(source), transformers.AutoModelForCausalLM, attention)


def test_a_quantized_checkpoint_is_refused_with_what_to_take(tmp_path: Path):
    pytest.importorskip("bitsandbytes")
    source = save_pico(tmp_path / "source", num_hidden_layers=1)
    quantized = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (source / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | quantized))
    with pytest.raises(InputError, match="is quantized .bitsandbytes.* take the checkpoint that it was made from"):
        convert_model(str(source), tmp_path / "out", dtype="bfloat16", revision="main")


@pytest.mark.parametrize("family", slow_but(["llama"], ["llama", "gpt2", "bert"]))
def test_a_language_model_becomes_a_classifier_by_its_classes(tmp_path: Path, family: str):
    """Its body stays, its head is new, the same each time, and the classes have their names."""
    source = save_pico(tmp_path / "source", family, pad_token_id=0)
    told = made(source, tmp_path / "out", classes=CLASSES)
    assert "a new head of 3 classes" in told
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    assert [config.id2label[number] for number in range(3)] == CLASSES
    body = {name: one for name, one in state(tmp_path / "out").items() if "encoder." in name or "layers." in name}
    before = state(source)
    assert all(one.equal(before[name]) for name, one in body.items())
    made(source, tmp_path / "again", classes=CLASSES)
    again = state(tmp_path / "again")
    assert all(one.equal(again[name]) for name, one in state(tmp_path / "out").items())
    same = made(tmp_path / "out", tmp_path / "same", classes=CLASSES)
    assert "new head" not in same  # a head for as many is kept
    assert "a new head of 2 classes" in made(tmp_path / "out", tmp_path / "two", classes=CLASSES[:2])


def test_where_a_model_was_made_from_stays_with_the_coordinator(tmp_path: Path):
    """A path of its machine is in no model that is sent, averaged or kept in an archive."""
    source = save_pico(tmp_path / "of_somebody")
    made(source, tmp_path / "out")
    archive = Archive(tmp_path / "archive")
    archive.begin(tmp_path / "out", "made")
    (tmp_path / "next").mkdir()
    copy_companions(tmp_path / "out", tmp_path / "next")
    kept = [path for folder in (archive.path, tmp_path / "next") for path in folder.rglob("*") if path.is_file()]
    assert {"config.json", "manifest.json"} <= {path.name for path in kept}
    assert not any(b"of_somebody" in path.read_bytes() for path in kept)
    assert "is there already" in made(source, tmp_path / "out")


def test_a_tokenizers_named_templates_go_with_the_model(tmp_path: Path):
    """A published model had lost its template of conversations with tools (Command R's, Hermes')."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(save_chat_tokenizer(tmp_path / "tokenizer"))
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(save_pico(tmp_path / "source"))
    made(tmp_path / "source", tmp_path / "out")
    (tmp_path / "next").mkdir()
    copy_companions(tmp_path / "out", tmp_path / "next")
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "next")
    assert found.chat_template == tokenizer.chat_template
    (tmp_path / "out" / "spiece.model").write_text("x")
    (tmp_path / "merged").mkdir()
    adapted = SimpleNamespace(merge_and_unload=lambda: SimpleNamespace(save_pretrained=lambda directory: None))
    write_merged(tmp_path / "merged", adapted, tmp_path / "out")
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == tokenizer.chat_template
    assert (tmp_path / "merged" / "spiece.model").is_file()


def state(directory: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(directory)
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def test_a_classifier_without_its_head_is_refused_with_the_way_out(tmp_path: Path):
    source = save_pico(tmp_path / "source", pad_token_id=0)
    config = transformers.AutoConfig.from_pretrained(source)
    config.architectures = ["LlamaForSequenceClassification"]
    config.save_pretrained(source)
    with pytest.raises(InputError, match=r"no weights for 'score.weight'.*give --classes"):
        made(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("classes", [["one"], ["same", "same"]])
def test_classes_are_two_or_more_each_once(tmp_path: Path, classes: list[str]):
    with pytest.raises(InputError, match="expected two or more, each once"):
        made(save_pico(tmp_path / "source"), tmp_path / "out", classes=classes)


def test_a_checkpoint_that_lacks_a_block_is_not_filled_at_random_beside_a_new_head(tmp_path: Path):
    source = save_pico(tmp_path / "source", pad_token_id=0)
    config = transformers.AutoConfig.from_pretrained(source)
    config.num_hidden_layers += 1
    config.save_pretrained(source)
    with pytest.raises(InputError, match=r"holds no weights for 'model.layers.4"):
        made(source, tmp_path / "out", classes=CLASSES)


def test_bars_of_progress_are_for_terminals(tmp_path: Path):
    """`crossfed model > log 2>&1` filled the log with them."""
    source = save_pico(tmp_path / "source")
    words = ["--source", str(source), "--out", str(tmp_path / "out")]
    done = Started("coordinator.model", words, tmp_path / "outputs", dict(os.environ)).ended()
    assert done.returncode == 0 and "%|" not in done.stderr, done.stderr
