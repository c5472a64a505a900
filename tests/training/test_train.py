"""Laws of one local round."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from facility.exchange.messages.loss_curve import loss_curve_of
from facility.exchange.messages.manifest import Manifest, sha256_of, verify_manifest, write_manifest
from facility.exchange.messages.report import predicted_memory_of, read_report
from tests.pico import save_pico
from tests.training.federation import (
    largest_difference,
    train,
    weights,
    write_dataset,
    write_masked_words,
    write_settings,
)
from tests.training.layouts import arguments, rounds_in


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data")


def test_the_command_learns_and_tells(tmp_path: Path, pico_llama: Path, dataset: Path):
    """Run as the workflow runs it: a command."""
    settings = write_settings(tmp_path / "settings.json")
    train(tmp_path / "out", pico_llama, dataset, settings)
    manifest, report = verify_manifest(tmp_path / "out"), read_report(tmp_path / "out")
    assert (manifest.kind, manifest.round, manifest.facility) == ("update", 0, "north")
    assert manifest.parameters == report.details["parameters"] == report.details["trained_parameters"] > 0
    assert report.loss_returned < report.loss_received
    assert (report.steps, report.samples, report.position, report.tokens) == (3, 12, 12, 12 * 16)
    assert weights(tmp_path / "out").keys() == weights(pico_llama).keys()
    assert 0.5 < report.peak_memory_bytes / predicted_memory_of(report) < 2, "libraries are most of it"
    curve = loss_curve_of(report)
    assert [step for step, _ in curve] == [1, 2, 3]
    assert sum(loss for _, loss in curve) / 3 == pytest.approx(report.training_loss, abs=1e-5)
    split = report.details["per_rank"][0]["seconds"]
    assert {"data", "forward", "backward", "optimizer"} <= set(split) and "all_reduce" not in split


def test_the_update_loads_and_its_loss_is_the_one_reported(tmp_path: Path, dataset: Path):
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    model = save_pico(tmp_path / "model", "gpt2")
    rounds_in([("one", arguments(tmp_path, model, dataset, export_dtype="bfloat16"))])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    ids = torch.from_numpy(np.load(dataset / "validation.npy").astype(np.int64))
    with torch.no_grad():
        loss = loaded.float()(ids, labels=ids).loss.item()
    assert loss == pytest.approx(read_report(tmp_path / "out").loss_returned, abs=1e-5)


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path, pico_llama: Path, dataset: Path):
    rounds_in([(name, arguments(tmp_path / name, pico_llama, dataset)) for name in ("a", "b")])
    assert sha256_of(tmp_path / "a/out/model.safetensors") == sha256_of(tmp_path / "b/out/model.safetensors")


@pytest.mark.slow
def test_a_batch_is_the_same_however_it_is_cut(tmp_path: Path, pico_llama: Path, dataset: Path):
    """Micro-batches, two ranks, and three sequences that two ranks cannot share evenly."""
    for batch in (3, 4):
        place = tmp_path / str(batch)
        whole = ("whole", arguments(place / "whole", pico_llama, dataset, batch_sequences=batch))
        pieces = arguments(place / "pieces", pico_llama, dataset, batch_sequences=batch, micro_batch_sequences=1)
        rounds_in([whole, ("pieces", pieces)])
        assert largest_difference(place / "whole/out", place / "pieces/out") < 1e-5
    cases = [
        (str(b), arguments(tmp_path / str(b) / "two", pico_llama, dataset, batch_sequences=b, micro_batch_sequences=1))
        for b in (3, 4)
    ]
    rounds_in(cases, ranks=2)
    for batch in (3, 4):
        assert largest_difference(tmp_path / str(batch) / "whole/out", tmp_path / str(batch) / "two/out") < 1e-5


def test_rounds_follow_each_other_like_one_long_round(tmp_path: Path, pico_llama: Path, dataset: Path):
    """With the returned model sent straight back, two rounds of 3 steps are one round of 6."""
    rounds_in([("first", arguments(tmp_path / "two", pico_llama, dataset, rounds=2, warmup_steps=2))])
    received = (tmp_path / "two" / "out").rename(tmp_path / "received")
    (received / "report.json").unlink()
    write_manifest(received, Manifest(kind="model", federation="pico", round=1))
    rounds_in(
        [
            ("second", arguments(tmp_path / "two", received, dataset, round=1, rounds=2, warmup_steps=2)),
            ("long", arguments(tmp_path / "one", pico_llama, dataset, rounds=1, steps=6, warmup_steps=2)),
        ]
    )
    assert largest_difference(tmp_path / "one/out", tmp_path / "two/out") == 0.0
    assert read_report(tmp_path / "two/out").position == read_report(tmp_path / "one/out").position == 24


def test_a_round_done_again_gives_the_same_bytes(tmp_path: Path, pico_llama: Path, dataset: Path):
    digests = []
    for number in (0, 1, 1):
        rounds_in([(str(number), arguments(tmp_path, pico_llama, dataset, round=number))])
        digests.append(sha256_of(tmp_path / "out/model.safetensors"))
        (tmp_path / "out").rename(tmp_path / f"out-{len(digests)}")
    assert digests[0] != digests[1] == digests[2]
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["round-0", "round-1"]


def test_a_facility_that_sat_out_goes_on_at_the_right_place(tmp_path: Path, pico_llama: Path, dataset: Path):
    said = rounds_in([("late", arguments(tmp_path, pico_llama, dataset, round=2))])
    assert "sat out round 1" in said["late"][0] and "or crossfed rewind went back" in said["late"][0]
    assert read_report(tmp_path / "out").position == 3 * 12


def test_a_facility_that_missed_a_round_goes_on_with_its_own_moments(tmp_path: Path, pico_llama: Path, dataset: Path):
    """Not with new ones, whose first steps are small: as if it had trained round 2 after round 0."""
    digests = []
    for number in (0, 2, 2):
        said = rounds_in([(str(number), arguments(tmp_path, pico_llama, dataset, round=number))])
        digests.append(sha256_of(tmp_path / "out/model.safetensors"))
        position = read_report(tmp_path / "out").position
        shutil.rmtree(tmp_path / "out")
    assert "continuing from" in said["2"][0] and "round-0" in said["2"][0]
    assert digests[1] == digests[2] and position == 24, "the round is repeated from the same state"
    assert json.loads((tmp_path / "state/round-2/state.json").read_text())["optimizer_steps"] == 6
    assert sorted(p.name for p in (tmp_path / "state").iterdir()) == ["round-0", "round-2"]


def test_bad_input_is_one_clear_error_on_every_rank(tmp_path: Path, pico_llama: Path, dataset: Path):
    truncated = save_pico(tmp_path / "truncated")
    write_manifest(truncated, Manifest(kind="model", federation="pico", round=0))
    file = truncated / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    plan = tmp_path / "plan.json"
    plan.write_text(
        json.dumps(
            {
                "stages": 3,
                "replicas": 1,
                "grid": [[0], [1], [2]],
                "stage_units": [[0, 2], [2, 3], [3, 6]],
                "micro_batches": 4,
            }
        )
    )
    large = write_dataset(tmp_path / "large", vocabulary=300)
    twice = {"stages": 2, "units": [[0, 3], [2, 6]]}
    missing = {"stages": 2, "units": [[0, 2], [3, 6]]}
    altered = save_pico(tmp_path / "altered")
    write_manifest(altered, Manifest(kind="model", federation="pico", round=0))
    data = bytearray((altered / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (altered / "model.safetensors").write_bytes(data)
    cases = {
        "vocabulary of 300": arguments(tmp_path / "a", pico_llama, large),
        "truncated": arguments(tmp_path / "b", truncated, dataset),
        "unit 2 is in two chunks": arguments(tmp_path / "c", pico_llama, dataset, layout=twice),
        "unit 2 is in no chunk": arguments(tmp_path / "g", pico_llama, dataset, layout=missing),
        "sha256": arguments(tmp_path / "h", altered, dataset),
        "the plan uses": [*arguments(tmp_path / "d", pico_llama, dataset), "--plan", str(plan)],
        "2 ranks read data": arguments(tmp_path / "e", pico_llama, dataset, batch_sequences=1),
        "B of memory (weights": arguments(tmp_path / "f", pico_llama, dataset, limits={"memory_bytes": 1000}),
    }
    for expected, texts in rounds_in(list(cases.items()), ranks=2, expect=2).items():
        for text in texts:
            assert text.count("error:") == 1 and expected in text, (expected, text)
    assert not list(tmp_path.glob("*/out"))


def test_a_rank_alone_refuses_an_altered_model_as_it_loads_it(tmp_path: Path, dataset: Path):
    altered = save_pico(tmp_path / "altered")
    write_manifest(altered, Manifest(kind="model", federation="pico", round=0))
    data = bytearray((altered / "model.safetensors").read_bytes())
    data[-5] ^= 1
    (altered / "model.safetensors").write_bytes(data)
    found = rounds_in([("altered", arguments(tmp_path / "a", altered, dataset))], ranks=1, expect=2)
    assert "another sha256" in found["altered"][0]
    assert not (tmp_path / "a").exists() or not any((tmp_path / "a").rglob("*.safetensors"))


def test_a_loss_that_is_no_number_ends_the_round_before_more_is_computed(
    tmp_path: Path, pico_llama: Path, dataset: Path
):
    from safetensors.torch import load_file, save_file

    overflows = save_pico(tmp_path / "overflows")
    tensors = load_file(overflows / "model.safetensors")
    save_file(
        {name: value * 1e30 if "norm" in name else value for name, value in tensors.items()},
        overflows / "model.safetensors",
    )
    cases = {
        "received": arguments(tmp_path / "received", overflows, dataset),
        "returned": arguments(tmp_path / "returned", pico_llama, dataset, learning_rate=1e30),
        "received for the last": arguments(tmp_path / "last", overflows, dataset, 3),
    }
    said = rounds_in(list(cases.items()), expect=2)
    for name, (text,) in said.items():
        which = name.split()[0]
        assert f"error: the {which} model's loss on the validation data is nan, expected a number" in text
        assert ("step 1/3" in text) == (which == "returned")
    assert not list(tmp_path.glob("*/state/round-*"))


def test_a_vocabulary_of_the_same_size_but_other_tokens_is_refused(tmp_path: Path):
    """A tokenizer written anew with the same tokens passes."""
    words = write_masked_words(tmp_path / "words")
    model = save_pico(tmp_path / "model", "bert")
    shutil.copytree(words / "tokenizer", model, dirs_exist_ok=True)
    configuration = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(configuration | {"note": "written by another version"}))
    rounds_in([("same", arguments(tmp_path / "same", model, words))])
    text = (model / "tokenizer.json").read_text()
    (model / "tokenizer.json").write_text(text.replace('"w7"', '"x7"'))
    said = rounds_in([("other", arguments(tmp_path / "other", model, words))], expect=2)["other"][0]
    assert "another vocabulary" in said and "2 entries differ" in said and "'w7' = 7" in said


def test_a_tied_checkpoint_that_repeats_its_head_comes_back_with_both(tmp_path: Path, dataset: Path):
    from safetensors.torch import load_file, save_file

    model = save_pico(tmp_path / "tied", tie_word_embeddings=True)
    tensors = load_file(model / "model.safetensors")
    assert "lm_head.weight" not in tensors
    rounds_in([("plain", arguments(tmp_path / "plain", model, dataset))])
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["something.else"] = tensors["model.norm.weight"] + 1
    save_file(tensors, model / "model.safetensors")
    rounds_in([("both", arguments(tmp_path / "both", model, dataset))])
    plain, both = weights(tmp_path / "plain/out"), weights(tmp_path / "both/out")
    assert both["lm_head.weight"].equal(both["model.embed_tokens.weight"])
    assert both["lm_head.weight"].equal(plain["model.embed_tokens.weight"])
    assert both["something.else"].equal(tensors["something.else"])


def test_half_precision_overflow_names_the_tensor(tmp_path: Path, pico_llama: Path, dataset: Path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(pico_llama / "model.safetensors")
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, pico_llama / "model.safetensors")
    said = rounds_in([("over", arguments(tmp_path, pico_llama, dataset, export_dtype="float16"))], expect=2)
    assert "model.norm.weight" in said["over"][0] and "65504" in said["over"][0]


@pytest.mark.slow
def test_half_precision_is_half_the_bytes(tmp_path: Path, pico_llama: Path, dataset: Path):
    half = {"export_dtype": "bfloat16", "compute_dtype": "bfloat16"}
    cases = [
        ("fsdp", arguments(tmp_path / "fsdp", pico_llama, dataset, **half)),
        ("pipeline", arguments(tmp_path / "pipeline", pico_llama, dataset, layout={"stages": 2}, **half)),
    ]
    rounds_in(cases, ranks=2)
    for name, _ in cases:
        out = tmp_path / name / "out"
        assert verify_manifest(out).dtypes == {"BF16": len(weights(pico_llama))}
        assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
        assert read_report(out).loss_returned < read_report(out).loss_received


def test_a_diverging_round_skips_counts_and_ends(tmp_path: Path, pico_llama: Path, dataset: Path):
    settings = {"learning_rate": 1e30, "clip_norm": 0.0, "steps": 20, "limits": {"bad_losses": 3}}
    said = rounds_in([("bad", arguments(tmp_path, pico_llama, dataset, **settings))], expect=2)
    assert "3 steps in a row" in said["bad"][0] and not (tmp_path / "out").exists()


def test_proximal_training_stays_closer_to_the_received_model(tmp_path: Path, pico_llama: Path, dataset: Path):
    free = arguments(tmp_path / "free", pico_llama, dataset, clip_norm=0.0, steps=8)
    held = arguments(tmp_path / "held", pico_llama, dataset, clip_norm=0.0, steps=8, proximal=100.0)
    rounds_in([("free", free), ("held", held)])

    def moved(out: Path) -> float:
        before, after = weights(pico_llama), weights(out)
        return sum(float((after[n] - before[n]).square().sum()) for n in before)

    assert moved(tmp_path / "held/out") < 0.5 * moved(tmp_path / "free/out")


@pytest.mark.slow
def test_the_report_tells_mfu_of_a_given_peak_and_the_time_in_collectives(
    tmp_path: Path, pico_llama: Path, dataset: Path
):
    cases = [
        (name, arguments(tmp_path / name, pico_llama, dataset, peak_flops=peak, layout=layout))
        for name, peak, layout in (("known", 1e12, {}), ("unknown", 0.0, {}), ("copies", 0.0, {"sharding": "NO_SHARD"}))
    ]
    rounds_in(cases, ranks=2)
    known, unknown, copies = (read_report(tmp_path / name / "out").details for name in ("known", "unknown", "copies"))
    assert known["mfu"] == pytest.approx(known["flops_per_second"] / 2e12) and known["mfu"] > 0
    assert unknown["mfu"] is None
    for rank in known["per_rank"]:
        split = rank["seconds"]
        assert 0 < split["all_gather"] + split["reduce_scatter"] < split["forward"] + split["backward"]
        assert "all_reduce" not in split
    for rank in copies["per_rank"]:
        split = rank["seconds"]
        assert "all_gather" not in split and 0 < split["all_reduce"] < split["backward"]


def test_a_tracker_and_a_trace_are_written_or_said_to_be_off(tmp_path: Path, pico_llama: Path, dataset: Path):
    from importlib.util import find_spec

    watched = {"trace": True, "tracker": "tensorboard"}
    said = rounds_in([("one", arguments(tmp_path, pico_llama, dataset, **watched))])["one"][0]
    trace = json.loads((tmp_path / "state/trace-round-0-rank-0.json").read_text())
    assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])
    written = list((tmp_path / "state").rglob("events.out.tfevents*"))
    installed = find_spec("tensorboard") or find_spec("tensorboardX")
    assert bool(written) == bool(installed) and ("is off" in said) == (not installed)


@pytest.mark.parametrize("fails", ["start", "log", "finish"])
def test_a_tracker_that_fails_ends_no_round(
    tmp_path: Path, pico_llama: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch, fails: str
):
    """As one does on a compute node without a network or an account."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    class Failing:
        requires_logging_directory = False

        def __init__(self, run: str) -> None:
            self.called("start")

        def called(self, what: str) -> None:
            if what == fails:
                raise RuntimeError("no API key")

        def log(self, values: dict[str, float], step: int) -> None:
            self.called("log")

        def finish(self) -> None:
            self.called("finish")

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "failing", Failing)
    said = rounds_in([("one", arguments(tmp_path, pico_llama, dataset, tracker="failing"))])["one"][0]
    assert "off" in said and said.count("no API key") == 1
    assert read_report(tmp_path / "out").steps == 3
