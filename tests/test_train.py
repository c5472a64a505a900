"""Laws of one local round, run as the workflow runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from facility.exchange.manifest import Manifest, sha256_of, verify_manifest, write_manifest
from facility.exchange.report import read_report
from tests.pico import save_pico
from tests.training.federation import largest_difference, train, weights, write_dataset, write_settings


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data")


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    return write_settings(tmp_path / "settings.json")


def test_a_round_learns_and_tells(tmp_path: Path, pico_llama: Path, dataset: Path, settings: Path):
    train(tmp_path / "out", pico_llama, dataset, settings)
    manifest, report = verify_manifest(tmp_path / "out"), read_report(tmp_path / "out")
    assert (manifest.kind, manifest.round, manifest.facility) == ("update", 0, "north")
    assert manifest.parameters == report.details.get("parameters", manifest.parameters) > 0
    assert report.loss_returned < report.loss_received
    assert (report.steps, report.samples, report.position, report.tokens) == (3, 12, 12, 12 * 16)
    assert weights(tmp_path / "out").keys() == weights(pico_llama).keys()


def test_the_update_loads_and_its_loss_is_the_one_reported(tmp_path: Path, dataset: Path):
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    model = save_pico(tmp_path / "model", "gpt2")
    settings = write_settings(tmp_path / "settings.json", export_dtype="bfloat16")
    train(tmp_path / "out", model, dataset, settings)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    ids = torch.from_numpy(np.load(dataset / "validation.npy").astype(np.int64))
    with torch.no_grad():
        loss = loaded.float()(ids, labels=ids).loss.item()
    assert loss == pytest.approx(read_report(tmp_path / "out").loss_returned, abs=1e-5)


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path, pico_llama: Path, dataset: Path, settings: Path):
    for name in ("a", "b"):
        train(tmp_path / name / "out", pico_llama, dataset, settings)
    assert sha256_of(tmp_path / "a/out/model.safetensors") == sha256_of(tmp_path / "b/out/model.safetensors")


def test_two_shards_train_like_one_process(tmp_path: Path, pico_llama: Path, dataset: Path, settings: Path):
    train(tmp_path / "one" / "out", pico_llama, dataset, settings)
    train(tmp_path / "two" / "out", pico_llama, dataset, settings, ranks=2)
    assert largest_difference(tmp_path / "one/out", tmp_path / "two/out") < 1e-5
    one, two = read_report(tmp_path / "one/out"), read_report(tmp_path / "two/out")
    assert two.loss_received == pytest.approx(one.loss_received, abs=1e-5)
    assert two.loss_returned == pytest.approx(one.loss_returned, abs=1e-5)
    assert two.training_loss == pytest.approx(one.training_loss, abs=1e-5)


def test_accumulated_micro_batches_train_like_the_whole_batch(tmp_path: Path, pico_llama: Path, dataset: Path):
    whole = write_settings(tmp_path / "whole.json")
    pieces = write_settings(tmp_path / "pieces.json", micro_batch_sequences=1)
    train(tmp_path / "whole" / "out", pico_llama, dataset, whole)
    train(tmp_path / "pieces" / "out", pico_llama, dataset, pieces)
    assert largest_difference(tmp_path / "whole/out", tmp_path / "pieces/out") < 1e-5


def test_a_batch_that_the_ranks_do_not_divide_trains_the_same(tmp_path: Path, pico_llama: Path, dataset: Path):
    settings = write_settings(tmp_path / "odd.json", batch_sequences=3, micro_batch_sequences=1)
    train(tmp_path / "one" / "out", pico_llama, dataset, settings)
    train(tmp_path / "two" / "out", pico_llama, dataset, settings, ranks=2)
    assert largest_difference(tmp_path / "one/out", tmp_path / "two/out") < 1e-5


def test_rounds_follow_each_other_like_one_long_round(tmp_path: Path, pico_llama: Path, dataset: Path):
    """With the returned model sent straight back, two rounds of 3 steps are one round of 6."""
    two = write_settings(tmp_path / "two.json", rounds=2, warmup_steps=2)
    one = write_settings(tmp_path / "one.json", rounds=1, steps=6, warmup_steps=2)
    train(tmp_path / "two" / "first", pico_llama, dataset, two)
    received = tmp_path / "received"
    (tmp_path / "two" / "first").rename(received)
    (received / "report.json").unlink()
    write_manifest(received, Manifest(kind="model", federation="pico", round=1))
    train(tmp_path / "two" / "out", received, dataset, two, round=1)
    train(tmp_path / "one" / "out", pico_llama, dataset, one)
    assert largest_difference(tmp_path / "one/out", tmp_path / "two/out") == 0.0
    assert read_report(tmp_path / "two/out").position == read_report(tmp_path / "one/out").position == 24


def test_a_round_done_again_gives_the_same_bytes(tmp_path: Path, pico_llama: Path, dataset: Path, settings: Path):
    for number, name in ((0, "r0"), (1, "r1"), (1, "r1-again")):
        train(tmp_path / name, pico_llama, dataset, settings, round=number)
    assert sha256_of(tmp_path / "r1/model.safetensors") == sha256_of(tmp_path / "r1-again/model.safetensors")
    assert sha256_of(tmp_path / "r0/model.safetensors") != sha256_of(tmp_path / "r1/model.safetensors")
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["round-0", "round-1"]


def test_a_facility_that_sat_out_goes_on_at_the_right_place(
    tmp_path: Path, pico_llama: Path, dataset: Path, settings: Path
):
    (result,) = train(tmp_path / "out", pico_llama, dataset, settings, round=2)
    assert "sat out round 1" in result.stderr
    assert read_report(tmp_path / "out").position == 3 * 12


@pytest.mark.parametrize("ranks", [1, 2])
def test_bad_input_is_one_clear_error_on_every_rank(tmp_path: Path, pico_llama: Path, settings: Path, ranks: int):
    large = write_dataset(tmp_path / "large", vocabulary=300)
    for result in train(tmp_path / "out", pico_llama, large, settings, ranks=ranks, expect=2):
        assert result.stderr.count("error:") == 1
        assert "vocabulary of 300" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_truncated_model_is_refused(tmp_path: Path, pico_llama: Path, dataset: Path, settings: Path):
    write_manifest(pico_llama, Manifest(kind="model", federation="pico", round=0))
    file = pico_llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    (result,) = train(tmp_path / "out", pico_llama, dataset, settings, expect=2)
    assert "truncated" in result.stderr


def test_a_tied_checkpoint_that_repeats_its_head_comes_back_with_both(tmp_path: Path, dataset: Path, settings: Path):
    from safetensors.torch import load_file, save_file

    model = save_pico(tmp_path / "tied", tie_word_embeddings=True)
    tensors = load_file(model / "model.safetensors")
    assert "lm_head.weight" not in tensors
    train(tmp_path / "plain" / "out", model, dataset, settings)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["something.else"] = tensors["model.norm.weight"] + 1
    save_file(tensors, model / "model.safetensors")
    train(tmp_path / "both" / "out", model, dataset, settings)
    plain, both = weights(tmp_path / "plain/out"), weights(tmp_path / "both/out")
    assert both["lm_head.weight"].equal(both["model.embed_tokens.weight"])
    assert both["lm_head.weight"].equal(plain["model.embed_tokens.weight"])
    assert both["something.else"].equal(tensors["something.else"])


def test_half_precision_overflow_names_the_tensor(tmp_path: Path, pico_llama: Path, dataset: Path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(pico_llama / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, pico_llama / "model.safetensors")
    settings = write_settings(tmp_path / "settings.json", export_dtype="float16")
    (result,) = train(tmp_path / "out", pico_llama, dataset, settings, expect=2)
    assert "model.norm.weight" in result.stderr and "65504" in result.stderr


def test_half_precision_is_half_the_bytes(tmp_path: Path, pico_llama: Path, dataset: Path):
    settings = write_settings(tmp_path / "settings.json", export_dtype="bfloat16", compute_dtype="bfloat16")
    train(tmp_path / "out", pico_llama, dataset, settings, ranks=2)
    assert verify_manifest(tmp_path / "out").dtypes == {"BF16": len(weights(pico_llama))}
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
