"""Tensors that are not federated stay at their facility, come back in the next round, and are in no update."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from coordinator.memory.figures import model_figures
from coordinator.preflight.disk import facility_disk
from facility.exchange.checkpoints.adapters import PREFIX
from facility.exchange.checkpoints.checkpoint import ADAPTER, open_checkpoint, save_tensors
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.messages.manifest import Manifest, read_manifest, verify_manifest, write_manifest
from facility.exchange.messages.settings import TrainingSettings
from facility.rounds.job import Job
from facility.rounds.one_round import OneRound
from facility.rounds.personal import Personal
from tests.aggregation.updates import write_update
from tests.pico import save_pico

HEAD = Patterns(exclude=("lm_head.*",))


def model(directory: Path, *, seed: int = 0, round: int = 0) -> Path:
    save_pico(directory, seed=seed, dtype="bfloat16")
    write_manifest(directory, Manifest(kind="model", federation="f", round=round))
    return directory


def test_the_head_stays_and_comes_back(tmp_path: Path):
    received = model(tmp_path / "received")
    personal = Personal(tmp_path / "state", HEAD)
    assert personal.put_in(received, 0) == received  # nothing of its own yet
    update = write_update(tmp_path / "update", received, "a", move=0.5)
    trained_head = open_checkpoint(update).read("lm_head.weight")
    personal.take_out(update, received, 0)
    assert "lm_head.weight" not in open_checkpoint(update).tensors
    assert len(open_checkpoint(update).tensors) == len(open_checkpoint(received).tensors) - 1
    assert verify_manifest(update).base_sha256 == read_manifest(received).content_sha256

    following = model(tmp_path / "next", seed=9, round=1)
    mixed = personal.put_in(following, 1)
    verify_manifest(mixed)
    assert torch.equal(open_checkpoint(mixed).read("lm_head.weight"), trained_head)
    for name in open_checkpoint(following).tensors:
        if name != "lm_head.weight":
            assert torch.equal(open_checkpoint(mixed).read(name), open_checkpoint(following).read(name))


def test_what_is_evaluated_with_tensors_of_its_own_names_the_model_that_was_received(tmp_path: Path):
    """The coordinator knows that one alone, and refuses the evaluation of any other."""
    personal = Personal(tmp_path / "state", HEAD)
    received = model(tmp_path / "received")
    personal.take_out(write_update(tmp_path / "update", received, "a", move=0.5), received, 0)
    last = model(tmp_path / "last", seed=9, round=3)
    mixed = read_manifest(personal.put_in(last, 3))
    (tmp_path / "evaluated").mkdir()
    told = Manifest(kind="update", federation="f", facility="a", round=3, base_sha256=mixed.content_sha256)
    write_manifest(tmp_path / "evaluated", told)
    evaluation = OneRound.__new__(OneRound)
    settings = SimpleNamespace(rounds=3)
    job = SimpleNamespace(round=3, settings=settings, personal=personal, trained=tmp_path / "evaluated", received=last)
    evaluation.job = cast(Job, job)
    evaluation.compress()
    assert mixed.content_sha256 != read_manifest(last).content_sha256
    assert verify_manifest(tmp_path / "evaluated").base_sha256 == read_manifest(last).content_sha256


def test_a_round_done_again_starts_from_the_round_before(tmp_path: Path):
    personal = Personal(tmp_path / "state", HEAD)
    received = model(tmp_path / "received")
    for number, move in ((0, 0.25), (1, 0.5), (1, 0.5)):
        update = write_update(tmp_path / f"update{number}", received, "a", round=number, move=move)
        personal.take_out(update, received, number)
        kept = personal.kept(1)
        assert kept is not None and kept.directory.name == "round-0"
        shutil.rmtree(update)


def test_what_is_evaluated_has_the_newest_tensors_where_rounds_was_lowered_below_what_is_done(tmp_path: Path):
    """The evaluation has the number of rounds, 1, of which three were done."""
    personal = Personal(tmp_path / "state", HEAD)
    for number in range(3):
        received = model(tmp_path / f"received{number}", round=number)
        update = write_update(tmp_path / f"update{number}", received, "a", round=number, move=0.1 * (number + 1))
        personal.take_out(update, received, number)
    settings = SimpleNamespace(include=[], exclude=["lm_head.*"], model_encoding="full", rounds=1)
    arguments = argparse.Namespace(model=model(tmp_path / "last", seed=9, round=3), round=1)
    job = Job(
        arguments=arguments,
        settings=cast(Any, settings),
        state=tmp_path / "state",
        dataset=tmp_path,
        **dict.fromkeys(("tasks", "notes", "meter"), cast(Any, None)),
    )
    personal.put_in(job.received, job.goes_on_at)
    kept = personal.kept(3)
    assert kept is not None and kept.directory.name == "round-2"
    assert torch.equal(open_checkpoint(job.model).read("lm_head.weight"), kept.read("lm_head.weight"))


def test_rounds_that_were_set_aside_leave_no_tensors_to_later_ones(tmp_path: Path):
    """The final evaluation has the number of rounds: after an early end it took what a round of the same number had
    left before `crossfed rewind`, or in a federation that was begun anew."""
    personal, received = Personal(tmp_path / "state", HEAD), model(tmp_path / "received")
    for number in (3, 4, 1):
        update = write_update(tmp_path / f"update{number}", received, "a", round=number, move=0.1 * number)
        personal.take_out(update, received, number)
    kept = personal.kept(5)
    assert kept is not None and kept.directory.name == "round-1"


def test_without_patterns_nothing_is_touched(tmp_path: Path):
    received = model(tmp_path / "received")
    update = write_update(tmp_path / "update", received, "a")
    before = read_manifest(update)
    Personal(tmp_path / "state", Patterns()).take_out(update, received, 0)
    assert read_manifest(update) == before and not (tmp_path / "state").exists()


def test_the_bound_on_disk_is_what_is_there_as_an_update_is_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In a third round, whose predecessors' tensors are still there; the trainer writes what stays in float32."""
    personal, state, out = Personal(tmp_path / "state", HEAD), tmp_path / "state", tmp_path / "work"
    size = {"vocab_size": 2048, "hidden_size": 64, "tie_word_embeddings": False}
    received = save_pico(tmp_path / "received", dtype="bfloat16", **size)
    write_manifest(received, Manifest(kind="model", federation="f", round=0))
    tensors, most, remove = open_checkpoint(received), 0, shutil.rmtree

    def watched(path: Path, **options: Any) -> None:
        nonlocal most
        most = max(most, sum(file.stat().st_size for root in (state, out) for file in root.rglob("*.safetensors")))
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", watched)
    for number in range(3):
        personal.put_in(received, number)
        update = out / f"update{number}"
        update.mkdir(parents=True)
        kinds = {name: torch.bfloat16 if HEAD.federated(name) else torch.float32 for name in tensors.tensors}
        save_tensors(update, ((name, tensors.read(name).to(kind)) for name, kind in kinds.items()))
        write_manifest(update, Manifest(kind="update", federation="f", facility="a", round=number))
        personal.take_out(update, received, number)
        remove(update)
    parts = facility_disk(model_figures(received), TrainingSettings(), federated=HEAD).parts
    names = ("a model with its own tensors", "its own tensors", "update", "with its own tensors")
    assert most == pytest.approx(sum(parts[name] for name in names), rel=0.05)


def test_patterns_for_the_model_beneath_leave_adapters_as_they_were_written(tmp_path: Path):
    """In a file of their own: an update of one file for all was taken for a whole model, and its difference to the
    received one could not be sent. And nothing is kept, for which each round copied the model that came."""
    received, personal = model(tmp_path / "received"), Personal(tmp_path / "state", Patterns(exclude=("*norm*",)))
    update = tmp_path / "update"
    update.mkdir()
    adapter = {f"{PREFIX}model.layers.0.self_attn.q_proj.lora_{half}.weight": torch.ones(2, 2) for half in "AB"}
    save_file(adapter, update / ADAPTER)
    write_manifest(update, Manifest(kind="update", federation="f", facility="a", round=0))
    content = (update / ADAPTER).read_bytes()
    personal.take_out(update, received, 0)
    assert [file.name for file in update.glob("*.safetensors")] == [ADAPTER]
    assert (update / ADAPTER).read_bytes() == content
    assert verify_manifest(update).base_sha256 == read_manifest(received).content_sha256
    assert personal.put_in(received, 1) == received
