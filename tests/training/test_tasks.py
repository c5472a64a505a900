"""Laws of what is trained: adapters only, part of a model, masked words, classes, very deep models."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from coordinator.memory.figures import model_figures
from facility.dataset import DatasetManifest, SplitEntry
from facility.exchange.checkpoints.base_model import base_digest
from facility.exchange.checkpoints.families import FROM_PADDING, most_positions
from facility.exchange.messages.manifest import read_manifest, sha256_of
from facility.exchange.messages.report import read_report
from facility.exchange.messages.settings import TrainingSettings
from facility.training.model import positions_in
from tests.pico import pico_config, save_pico
from tests.training.families import save_tiny
from tests.training.federation import largest_difference, weights, write_dataset, write_masked_words
from tests.training.layouts import TWO, arguments, rounds_in

TOKENS, CLASSES = 16, 3


def write_classes(directory: Path, *, blocks: int = 40, seed: int = 0, end: int | None = None) -> Path:
    """Pairs of texts of unequal length, whose class is a matter of their first token; `end`: the last one."""
    draw = np.random.default_rng(seed)
    directory.mkdir()
    splits = {}
    for name, count in (("train", blocks), ("validation", 8)):
        ids = draw.integers(1, 128, size=(count, TOKENS)).astype(np.int32)
        lengths = draw.integers(6, TOKENS + 1, size=count)
        ids[np.arange(TOKENS) >= lengths[:, None]] = 0
        if end is not None:
            ids[ids == end] = end + 1
            ids[np.arange(count), lengths - 1] = end
        rows = np.stack([ids[:, 0] % CLASSES, lengths, lengths // 2], axis=1).astype(np.int32)
        np.save(directory / f"{name}.npy", ids)
        np.save(directory / f"{name}.rows.npy", rows)
        splits[name] = SplitEntry(
            blocks=count,
            documents=count,
            empty_documents=0,
            tokens=ids.size,
            tail_tokens=0,
            sha256=sha256_of(directory / f"{name}.npy"),
            rows_sha256=sha256_of(directory / f"{name}.rows.npy"),
        )
    manifest = DatasetManifest(
        task="classification",
        block_tokens=TOKENS,
        vocabulary_size=128,
        tokenizer_sha256="0" * 64,
        template="{text}",
        classes=["a", "b", "c"],
        pad_token_id=0,
        splits=splits,
        sources=[],
    )
    (directory / "dataset.json").write_text(json.dumps(dataclasses.asdict(manifest)))
    return directory


def save_classifier(directory: Path, layers: int, family: str = "bert", **changes: Any) -> Path:
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    depth = {"n_layer" if family == "gpt2" else "num_hidden_layers": layers}
    config = pico_config(family, num_labels=CLASSES, **({"pad_token_id": 0} | depth | changes))
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    return directory


PIPELINE = {"layout": {"stages": 2, "units": [[0, 2], [2, 6]]}}


@pytest.mark.slow
def test_adapters_travel_alone_and_train_alike_in_every_layout(tmp_path: Path):
    dataset = write_dataset(tmp_path / "data")
    model = save_pico(tmp_path / "model", "llama", tie_word_embeddings=True)
    lora = {"lora": {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"]}, "learning_rate": 1e-2, "epsilon": 1e-5}
    rounds_in([("one", arguments(tmp_path / "one", model, dataset, **lora))])
    rounds_in(
        [
            (name, arguments(tmp_path / name, model, dataset, **lora, **layout))
            for name, layout in (("fsdp", {}), ("pipeline", PIPELINE))
        ],
        ranks=2,
    )
    update = weights(tmp_path / "one/out")
    assert all(".lora_A." in name or ".lora_B." in name for name in update) and len(update) == 4 * 3 * 2
    assert read_manifest(tmp_path / "one/out").encoding == "lora"
    assert read_report(tmp_path / "one/out").loss_returned < read_report(tmp_path / "one/out").loss_received
    for name in ("fsdp", "pipeline"):
        assert largest_difference(tmp_path / "one/out", tmp_path / name / "out") < 1e-5


@pytest.mark.parametrize(
    "more", [{}, {"rslora": True, "alpha": 8}, {"modules_to_save": ["lm_head"]}, {"modules_to_save": ["embed_tokens"]}]
)
def test_adapters_load_with_peft_and_give_the_reported_loss(tmp_path: Path, more: dict[str, Any]):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    rounds_in([("one", arguments(tmp_path, model, dataset, lora={"rank": 4} | more, learning_rate=1e-2))])
    out = tmp_path / "out"
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), out)
    ids = torch.from_numpy(np.load(dataset / "validation.npy").astype(np.int64))
    with torch.no_grad():
        loss = loaded(input_ids=ids, labels=ids).loss.item()
    assert loss == pytest.approx(read_report(out).loss_returned, abs=1e-5)


@pytest.mark.slow
def test_a_classifiers_head_is_trained_and_travels_with_its_adapters(tmp_path: Path):
    """In every layout alike; peft loads the update; the next round goes on from what was sent."""
    from peft import PeftModel
    from torch.nn import functional as F
    from transformers import AutoModelForSequenceClassification

    classes, head = write_classes(tmp_path / "classes"), "base_model.model.score.weight"
    model = save_classifier(tmp_path / "model", 4, "llama")
    lora = {"lora": {"rank": 4}, "learning_rate": 5e-3, "epsilon": 1e-5}  # above rounding, which such a rate would show
    rounds_in([("one", arguments(tmp_path / "one", model, classes, **lora))])
    layouts = {"fsdp": {}, "pipeline": PIPELINE}
    rounds_in([(n, arguments(tmp_path / n, model, classes, **lora, **more)) for n, more in layouts.items()], ranks=2)
    out = tmp_path / "one/out"
    assert {name for name in weights(out) if ".lora_" not in name} == {head}
    assert (weights(out)[head] - weights(model)["score.weight"]).abs().max() > 1e-3
    for name in layouts:
        assert largest_difference(out, tmp_path / name / "out") < 2e-6, name
    loaded = PeftModel.from_pretrained(AutoModelForSequenceClassification.from_pretrained(model), out).eval()
    ids = torch.from_numpy(np.load(classes / "validation.npy").astype(np.int64))
    labels, lengths, _ = torch.from_numpy(np.load(classes / "validation.rows.npy").astype(np.int64)).T
    with torch.no_grad():
        found = loaded(input_ids=ids, attention_mask=(torch.arange(TOKENS) < lengths[:, None]).long()).logits
    assert F.cross_entropy(found, labels).item() == pytest.approx(read_report(out).loss_returned, abs=1e-5)
    received = out.rename(tmp_path / "received")
    (received / "manifest.json").unlink()
    again = lora | {"lora": {"rank": 4, "base": str(model)}}
    rounds_in([("two", arguments(tmp_path / "two", received, classes, round=1, **again))])
    assert read_report(tmp_path / "two/out").loss_received == pytest.approx(
        read_report(received).loss_returned, abs=1e-6
    )


def test_a_module_to_save_that_no_model_has_is_refused(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    lora = {"rank": 2, "modules_to_save": ["tail"]}
    said = rounds_in([("one", arguments(tmp_path / "one", model, dataset, lora=lora))], expect=2)
    assert "names 'tail'" in said["one"][0] and "lm_head" in said["one"][0]


def test_the_next_round_goes_on_from_received_adapters(tmp_path: Path):
    """The base stays at the facility: what travels both ways is the adapters."""
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    rounds_in([("r0", arguments(tmp_path, model, dataset, lora={"rank": 4}))])
    received = (tmp_path / "out").rename(tmp_path / "received")
    (received / "manifest.json").unlink()
    lora = {"rank": 4, "base": str(model)}
    rounds_in([("r1", arguments(tmp_path, received, dataset, round=1, lora=lora))])
    before, after = read_report(received), read_report(tmp_path / "out")
    assert after.loss_received == pytest.approx(before.loss_returned, abs=1e-6)
    assert weights(tmp_path / "out").keys() == weights(received).keys()


def test_adapters_are_trained_beside_the_stated_base_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    lora = {"rank": 4, "base": str(model), "base_sha256": base_digest(model)}
    rounds_in([("stated", arguments(tmp_path / "stated", model, dataset, lora=lora))])
    before = weights(model)
    save_file({name: value + 1e-3 for name, value in before.items()}, model / "model.safetensors")
    said = rounds_in([("other", arguments(tmp_path / "other", model, dataset, lora=lora))], expect=2)["other"][0]
    assert f"expected training.lora.base_sha256 {lora['base_sha256']}" in said and "Traceback" not in said
    assert not (tmp_path / "other/out/model.safetensors").exists()


def test_frozen_parameters_stay_as_received(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    freeze = {"freeze": ["model.embed_tokens.*", "model.layers.[01].*"]}
    rounds_in([("one", arguments(tmp_path / "one", model, dataset, **freeze))])
    rounds_in([("pipeline", arguments(tmp_path / "pipeline", model, dataset, **freeze, **PIPELINE))], ranks=2)
    before, after = weights(model), weights(tmp_path / "one/out")
    for name in before:
        still = name.startswith(("model.embed_tokens", "model.layers.0.", "model.layers.1."))
        assert before[name].equal(after[name]) == still, name
    assert largest_difference(tmp_path / "one/out", tmp_path / "pipeline/out") < 1e-5


def test_what_is_frozen_is_not_rounded_to_a_narrower_export(tmp_path: Path):
    """It would be averaged as a step, and a server optimizer would move it on in every round.

    A tied head, and experts that are one parameter in memory and several on disk.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads, tie_word_embeddings=True)).save_pretrained(tmp_path / "model")
    dataset, model, frozen = write_dataset(tmp_path / "data"), tmp_path / "model", ["model.layers.0.*"]
    half = {"export_dtype": "bfloat16", "freeze": frozen, "steps": 1}
    rounds_in([("one", arguments(tmp_path / "one", model, dataset, **half))])
    before, after = weights(model), weights(tmp_path / "one/out")
    for name, tensor in after.items():
        still = name.startswith("model.layers.0.")
        assert tensor.dtype == (torch.float32 if still else torch.bfloat16), name
        assert tensor.float().equal(before[name].to(tensor.dtype).float()) == still, name
    figures = model_figures(model)
    assert figures.written(TrainingSettings(freeze=frozen)) == sum(tensor.nbytes for tensor in after.values())


def test_what_stays_at_the_facility_is_not_rounded_to_the_dtype_that_travels(tmp_path: Path):
    """Half precision has no number between 1 and 1.0078: norms that are a facility's own would never move."""
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    given = arguments(tmp_path / "one", model, dataset, export_dtype="bfloat16", learning_rate=1e-4)
    settings = json.loads((tmp_path / "one/settings.json").read_text()) | {"exclude": ["*norm*"]}
    (tmp_path / "one/settings.json").write_text(json.dumps(settings))
    rounds_in([("one", given)])
    before, after = weights(model), weights(tmp_path / "one/out")
    for name in after:
        own = "norm" in name
        assert after[name].dtype == (torch.float32 if own else torch.bfloat16), name
        assert not own or 0 < (after[name] - before[name]).abs().max() < 1e-3, name


@pytest.mark.slow
def test_classes_and_masked_words_train_alike_in_a_pipeline(tmp_path: Path):
    classes, words = write_classes(tmp_path / "classes"), write_masked_words(tmp_path / "words")
    classifier, masked = save_classifier(tmp_path / "classifier", 4), save_pico(tmp_path / "masked", "bert")
    pairs = {"classes": (classifier, classes), "words": (masked, words)}
    rounds_in([(name, arguments(tmp_path / name / "one", *pair)) for name, pair in pairs.items()])
    rounds_in(
        [
            (f"{name} {kind}", arguments(tmp_path / name / kind, *pair, **layout))
            for name, pair in pairs.items()
            for kind, layout in (("fsdp", {}), ("pipeline", PIPELINE))
        ],
        ranks=2,
    )
    for name in pairs:
        for kind in ("fsdp", "pipeline"):
            assert largest_difference(tmp_path / name / "one/out", tmp_path / name / kind / "out") < 1e-5, (name, kind)
        assert largest_difference(pairs[name][0], tmp_path / name / "one/out") > 1e-3


DECODERS = ["llama", "gpt2"]


def plain_classes(model: Path, dataset: Path) -> float:
    """Loss on the padded validation rows as transformers gives it."""
    from torch.nn import functional as F
    from transformers import AutoModelForSequenceClassification

    net = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.from_numpy(np.load(dataset / "validation.npy").astype(np.int64))
    labels, lengths, _ = torch.from_numpy(np.load(dataset / "validation.rows.npy").astype(np.int64)).T
    mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    with torch.no_grad():
        return F.cross_entropy(net(input_ids=ids, attention_mask=mask).logits, labels).item()


def classes_alike(tmp_path: Path, layouts: dict[str, dict[str, Any]]) -> None:
    classes = write_classes(tmp_path / "classes")
    models = {family: save_classifier(tmp_path / f"{family}-model", 4, family) for family in DECODERS}
    rounds_in([(f, arguments(tmp_path / f / "one", model, classes)) for f, model in models.items()])
    rounds_in(
        [
            (f"{f} {name}", arguments(tmp_path / f / name, model, classes, **layout))
            for f, model in models.items()
            for name, layout in layouts.items()
        ],
        ranks=2,
    )
    for f, model in models.items():
        one = tmp_path / f / "one/out"
        assert read_report(one).loss_received == pytest.approx(plain_classes(model, classes), abs=1e-5), f
        assert read_report(one).loss_returned == pytest.approx(plain_classes(one, classes), abs=1e-5), f
        assert largest_difference(model, one) > 1e-3
        for name in layouts:
            assert largest_difference(one, tmp_path / f / name / "out") < 1e-5, (f, name)


@pytest.mark.slow
def test_decoders_classify_padded_rows_alike_in_a_pipeline(tmp_path: Path):
    """The last stage gets activations, and pools by the token ids all the same."""
    classes_alike(tmp_path, {"pipeline": PIPELINE})


@pytest.mark.slow
def test_decoders_classify_padded_rows_alike_in_every_layout(tmp_path: Path):
    classes_alike(tmp_path, TWO)


def test_a_classifier_that_knows_another_padding_token_or_none_is_refused(tmp_path: Path):
    classes = write_classes(tmp_path / "classes")
    cases = {
        "none": (save_classifier(tmp_path / "a", 2, "llama", pad_token_id=None), "has no pad_token_id"),
        "other": (save_classifier(tmp_path / "b", 2, "gpt2", pad_token_id=5), "has pad_token_id 5"),
    }
    said = rounds_in([(n, arguments(tmp_path / n, model, classes)) for n, (model, _) in cases.items()], expect=2)
    for name, (_, sentence) in cases.items():
        assert sentence in said[name][0] and "Traceback" not in said[name][0]
    bert = save_classifier(tmp_path / "c", 2, "bert", pad_token_id=None)  # it pools the first token
    said = rounds_in([("bert", arguments(tmp_path / "bert", bert, classes, lora={"rank": 2}))])
    assert "trained whole: classifier" in said["bert"][0]


@pytest.mark.slow
def test_a_bert_of_160_blocks_splits_and_trains(tmp_path: Path):
    dataset, model = write_classes(tmp_path / "classes"), save_classifier(tmp_path / "model", 160)
    layout = {"stages": 2, "units": [[0, 100], [100, 162]]}
    rounds_in([("deep", arguments(tmp_path, model, dataset, steps=2, layout=layout))], ranks=2)
    report = read_report(tmp_path / "out")
    assert report.details["layout"]["units"] == [[0, 100], [100, 162]]
    assert 0 <= report.details["bubble_measured"] < 1 and 0 < report.details["bubble_theory"] < 1
    assert weights(tmp_path / "out").keys() == weights(model).keys()


@pytest.mark.slow
def test_activation_checkpointing_changes_nothing(tmp_path: Path):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    kinds = ("none", "selective", "full")
    cases = [(k, arguments(tmp_path / k, model, dataset, layout={"activation_checkpointing": k})) for k in kinds]
    rounds_in(cases)
    staged = {"stages": 2, "units": [[0, 1], [1, 6]], "activation_checkpointing": "full"}
    rounds_in([("staged", arguments(tmp_path / "staged", model, dataset, layout=staged))], ranks=2)
    for kind in ("selective", "full", "staged"):
        assert largest_difference(tmp_path / "none/out", tmp_path / kind / "out") < 1e-5


@pytest.mark.slow
def test_a_family_that_no_stage_can_hold_is_refused_in_one_sentence_and_mamba_gets_adapters(tmp_path: Path):
    words, text = write_masked_words(tmp_path / "words"), write_dataset(tmp_path / "data")
    save = partial(save_tiny, factory="AutoModelForMaskedLM")
    refused = {
        "deberta": save(tmp_path / "deberta-model", "deberta"),
        "modernbert": save(tmp_path / "modernbert-model", "modernbert"),
    }
    whole = save(tmp_path / "deberta-v2-model", "deberta-v2")
    mamba = save_tiny(tmp_path / "mamba-model", "mamba", state_size=8)
    lora = {"rank": 2}
    rounds_in([("mamba", arguments(tmp_path / "mamba", mamba, text, lora=lora))])
    assert not any("out_proj" in name for name in weights(tmp_path / "mamba/out"))
    said = rounds_in(
        [("out", arguments(tmp_path / "out", mamba, text, lora=lora | {"targets": ["out_proj"]}))], expect=2
    )
    assert "out_proj" in said["out"][0] and "Traceback" not in said["out"][0]
    said = rounds_in(
        [(n, arguments(tmp_path / n, m, words, **PIPELINE)) for n, m in refused.items()], ranks=2, expect=2
    )
    for name in refused:
        assert all("cannot be split into stages" in text for text in said[name]), name
    rounds_in([("one", arguments(tmp_path / "one", whole, words))])
    rounds_in([("two", arguments(tmp_path / "two", whole, words, **PIPELINE))], ranks=2)
    assert largest_difference(tmp_path / "one/out", tmp_path / "two/out") < 1e-5


@pytest.mark.parametrize("family", [*FROM_PADDING, "bert", "gpt2", "esm with rotary positions"])
def test_the_longest_sequence_is_the_longest_that_the_model_takes(family: str):
    """Some families count positions from their padding token on, so that fewer tokens fit."""
    from transformers import AutoConfig, AutoModel

    name, _, rotary = family.partition(" ")
    size = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    size |= {"intermediate_size": 16, "max_position_embeddings": 20, "pad_token_id": 1}
    size |= {"longformer": {"attention_window": 8}, "gpt2": {"n_positions": 20}}.get(name, {})
    config = AutoConfig.for_model(name, **size | ({"position_embedding_type": "rotary"} if rotary else {}))
    if name == "xmod":
        config.default_language = "en_XX"
    most, model = positions_in(config), AutoModel.from_config(config).eval()
    assert most == (18 if name in FROM_PADDING and not rotary else 20)
    assert most == most_positions(json.loads(config.to_json_string(use_diff=False)))
    if rotary:
        return
    with torch.no_grad():
        model(input_ids=torch.full((1, most), 5))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, most + 1), 5))
