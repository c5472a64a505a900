"""Training alone: the same as one long round, one job a round; what is kept stays here, what leaves is one update."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from facility.exchange.errors import InputError
from facility.exchange.files.links import link_tree
from facility.exchange.messages.comparison import ALONE, ROUNDS, STEPS, Alone, alone_of
from facility.exchange.messages.manifest import (
    Manifest,
    read_manifest,
    verify_manifest,
    with_extra,
    with_run,
    write_manifest,
)
from facility.exchange.messages.outcome import Outcome
from facility.exchange.messages.report import read_failure, read_report
from facility.launching.supervise import Ending
from facility.round import main
from facility.rounds import alone
from facility.rounds import job as jobs
from facility.rounds.alone import OwnModel
from tests.training.federation import largest_difference, write_dataset, write_settings
from tests.training.layouts import arguments, rounds_in


def order(directory: Path, rounds: int, *, model: Path | None = None, run: str = "r1") -> Path:
    """The coordinator's order, with the initial model where it is given."""
    if model is not None:
        link_tree(model, directory)
    else:
        directory.mkdir()
    write_manifest(directory, Manifest(kind=ALONE, federation="pico", round=2, extra={ROUNDS: {"north": rounds}}))
    with_run(directory, run)
    return directory


def job(place: Path, sent: Path, dataset: Path, settings: Path) -> Path:
    """One job of the facility; returns what it leaves."""
    place.mkdir()
    out = place / "update"
    told = ["--model", sent, "--dataset", dataset, "--settings", settings, "--round", 2, "--out", out]
    assert main([*map(str, told), "--state", str(dataset.parent / "kept")]) in (0, 7)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, {"lora": {"rank": 2}}], ids=["whole", "adapters"])
def test_rounds_alone_are_one_long_round(lora: dict, tmp_path: Path, pico_llama: Path, monkeypatch, request):
    if lora:
        request.getfixturevalue("no_hard_links")
    monkeypatch.chdir(tmp_path)
    dataset = write_dataset(tmp_path / "data")
    federated = {"optimizer_state": "shared", "proximal": 0.5} if not lora else {"proximal": 0.5}
    settings = write_settings(tmp_path / "settings.json", rounds=2, warmup_steps=2, **federated, **lora)
    first = job(tmp_path / "one", order(tmp_path / "sent-1", 2, model=pico_llama), dataset, settings)
    assert read_failure(first) is None, read_failure(first)
    told = verify_manifest(first)
    assert alone_of(told) == Alone(rounds=1, of=2, tokens=12 * 16) and not list(first.glob("*.safetensors"))
    second = job(tmp_path / "two", order(tmp_path / "sent-2", 2), dataset, settings)
    assert alone_of(verify_manifest(second)) == Alone(rounds=2, of=2, tokens=24 * 16)
    assert read_report(second).round == read_manifest(second).round == 2
    again = job(tmp_path / "three", order(tmp_path / "sent-3", 2), dataset, settings)
    assert read_manifest(again).content_sha256 == read_manifest(second).content_sha256
    rounds_in([("long", arguments(tmp_path / "long", pico_llama, dataset, rounds=1, steps=6, warmup_steps=2, **lora))])
    assert largest_difference(tmp_path / "long" / "out", second) == 0.0
    assert sorted(path.name for path in (tmp_path / "kept" / "alone" / "state").iterdir()) == ["round-1"]


@pytest.mark.slow
def test_a_round_alone_takes_the_steps_that_its_round_took(tmp_path: Path, pico_llama: Path, monkeypatch):
    """As long as the facility agreed to so many; learning rates pass over the same part of the schedule."""
    monkeypatch.chdir(tmp_path)
    dataset = write_dataset(tmp_path / "data")
    settings = write_settings(tmp_path / "settings.json", rounds=2)
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"most_steps": 5}))
    for number, (steps, taken) in enumerate(((5, 5), (9, 3)), 1):
        sent = order(tmp_path / f"sent-{number}", 2, model=pico_llama)
        with_extra(sent, STEPS, {"north": [5, steps]})
        found = read_report(job(tmp_path / f"job-{number}", sent, dataset, settings))
        assert (found.steps, found.samples) == (taken, 4 * taken)


@pytest.mark.parametrize("wanted, dtype", [(1, "bfloat16"), (2, "float32")])
def test_the_model_is_rounded_after_the_last_round_alone_only(
    tmp_path: Path, pico_llama: Path, monkeypatch: pytest.MonkeyPatch, wanted: int, dtype: str
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(alone, "start_ranks", lambda *_: Ending(code=Outcome.INPUT, reason="not trained"))
    settings = write_settings(tmp_path / "settings.json", rounds=2, export_dtype="bfloat16")
    sent = order(tmp_path / "sent", wanted, model=pico_llama)
    left = job(tmp_path / "job", sent, write_dataset(tmp_path / "data"), settings)
    assert "not trained" in str(read_failure(left))
    asked = json.loads((tmp_path / "kept" / "alone" / "settings.json").read_text())
    assert asked["training"]["export_dtype"] == dtype


def test_without_the_initial_model_the_reason_is_told_and_another_run_begins_anew(tmp_path: Path, pico_llama: Path):
    own = OwnModel(tmp_path / "kept")
    with pytest.raises(InputError, match="sent with the next order"):
        own.begin(order(tmp_path / "empty", 2), "r1", 2)
    assert own.begin(order(tmp_path / "whole", 2, model=pico_llama), "r1", 2) == 0
    (own.model(0)).rename(own.model(1))
    assert own.begin(order(tmp_path / "later", 2), "r1", 2) == 1
    assert own.begin(order(tmp_path / "new", 2, model=pico_llama, run="r2"), "r2", 2) == 0 == own.rounds


def test_training_alone_begins_anew_where_it_has_gone_on_for_more_rounds_than_are_left(
    tmp_path: Path, pico_llama: Path
):
    """After `crossfed rewind` the model of five rounds alone was handed out as that of three."""
    own = OwnModel(tmp_path / "kept")
    own.begin(order(tmp_path / "first", 5, model=pico_llama), "r1", 5)
    own.model(0).rename(own.model(5))
    with pytest.raises(InputError, match="sent with the next order"):
        own.begin(order(tmp_path / "empty", 3), "r1", 3)
    assert own.begin(order(tmp_path / "whole", 3, model=pico_llama), "r1", 3) == 0 == own.rounds


def test_a_facility_that_took_part_in_no_round_trains_nothing(tmp_path: Path, pico_llama: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = write_settings(tmp_path / "settings.json", rounds=2)
    assert json.loads(settings.read_text())["rounds"] == 2
    out = job(
        tmp_path / "one", order(tmp_path / "sent", 0, model=pico_llama), write_dataset(tmp_path / "data"), settings
    )
    failure = read_failure(out)
    assert failure is not None and "no round" in failure.reason and not failure.again


@pytest.mark.slow
def test_a_facility_that_masks_trains_alone_and_hands_out_no_model(tmp_path: Path, pico_llama: Path, monkeypatch):
    """The job's own directory, which the coordinator reads, has no weights while it trains or after."""
    monkeypatch.chdir(tmp_path)
    settings = write_settings(tmp_path / "settings.json", rounds=2)
    masking = {"bits": 32, "threshold": 2, "facilities": ["north", "south", "west"], "peer_signers": "/signers"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"masking": masking}))
    started: list[list[str]] = []
    launch = jobs.launch_ranks
    monkeypatch.setattr(jobs, "launch_ranks", lambda words, **more: (started.append(words), launch(words, **more))[1])
    out = job(
        tmp_path / "one", order(tmp_path / "sent", 1, model=pico_llama), write_dataset(tmp_path / "data"), settings
    )
    assert read_failure(out) is None, read_failure(out)
    told = verify_manifest(out)
    assert alone_of(told) == Alone(rounds=1, of=1, tokens=12 * 16)
    assert told.parameters == 0 and set(told.files) == {"report.json"}
    assert not list((tmp_path / "one").rglob("*.safetensors"))
    (words,) = started
    assert Path(words[words.index("--out") + 1]).is_relative_to(tmp_path / "kept")
    assert verify_manifest(OwnModel(tmp_path / "kept").model(1)).parameters > 0, "it stays here"


def test_training_alone_is_no_second_privacy_budget(tmp_path: Path, pico_llama: Path, monkeypatch):
    """It would keep a ledger of its own, forgotten with every new run: an order for each would buy the budget again."""
    monkeypatch.chdir(tmp_path)
    settings, dataset = write_settings(tmp_path / "settings.json", rounds=2), write_dataset(tmp_path / "data")
    differential = {"epsilon": 8.0, "delta": 1e-3, "unit": "block"}
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"differential": differential}))
    for run in ("r1", "r2"):
        sent = order(tmp_path / f"sent-{run}", 1, model=pico_llama, run=run)
        failure = read_failure(job(tmp_path / f"job-{run}", sent, dataset, settings))
        assert failure is not None and "training alone" in failure.reason and not failure.again
    assert not list((tmp_path / "kept").rglob("*.jsonl")) and not list(tmp_path.rglob("*/update/*.safetensors"))
