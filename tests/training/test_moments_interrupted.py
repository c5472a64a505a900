"""Moments that facilities average, in rounds that are interrupted: the round ends as an undisturbed one does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.moments import BLOCKS, FIRST, FULL, INT8, StoredMoments, has_moments, shapes_in
from facility.exchange.checkpoints.second_moments import has_factors, kept_of, read_factors
from facility.exchange.messages.manifest import read_manifest
from facility.exchange.messages.outcome import Outcome
from facility.exchange.messages.report import read_report
from tests.pico import save_pico
from tests.training.federation import largest_difference, started, write_dataset
from tests.training.layouts import TWO, arguments, rounds_in

FORMS = [BLOCKS, INT8, FULL]


def settings_of(form: str, **more: Any) -> dict[str, Any]:
    return {"optimizer_state": "shared", "optimizer_state_form": form, "first_moments": "mean", "steps": 4} | more


def following(root: Path, name: str, dataset: Path, **settings: Any) -> list[str]:
    """Arguments of the second round, with a copy of the state of the first and the model that came of it."""
    place = root / name
    found = arguments(place, root / "received", dataset, 1, **settings)
    if not (place / "state").exists():
        shutil.copytree(root / "first" / "state", place / "state")
    return found


def first_round(root: Path, form: str, model: Path, dataset: Path) -> None:
    """`first`, and `received`: its model with the moments that it sent, as a federation of one returns them."""
    rounds_in([("first", arguments(root / "first", model, dataset, **settings_of(form)))])
    shutil.copytree(model, root / "received")
    for folder in ("moments", "second_moments"):
        shutil.copytree(root / "first" / "out" / folder, root / "received" / folder)


def same_moments(one: Path, other: Path, tolerance: float) -> None:
    """What two updates send of moments: values, and how much of the received ones is left in them."""
    shapes = shapes_in(open_checkpoint(one))
    ours, theirs = StoredMoments(one, shapes), StoredMoments(other, shapes)
    assert ours.moments == theirs.moments and {first for _, first in ours.moments} == {True, False}
    assert (ours.steps, ours.kept) == (theirs.steps, theirs.kept) and ours.kept > 0
    for moment in ours.moments.values():
        pair = [each.read(moment, 0, moment.rows) for each in (ours, theirs)]
        # A code of a byte, or a value of bfloat16, may be the next one where the layouts' rounding differs.
        step = {INT8: 0.095, FIRST: 2.0**-7}.get(moment.form, 0.0)
        assert np.allclose(*pair, rtol=tolerance + step * bool(tolerance), atol=tolerance * 1e-3), moment
    vectors = [read_factors(each, shapes)[0] for each in (one, other)]
    assert vectors[0].keys() == vectors[1].keys() != set() and kept_of(one) == kept_of(other)
    for name, factors in vectors[0].items():
        assert np.allclose(factors.rows, vectors[1][name].rows, rtol=tolerance, atol=tolerance * 1e-3), name


@pytest.mark.parametrize("form", [pytest.param(form, marks=() if form == INT8 else pytest.mark.slow) for form in FORMS])
def test_a_round_that_is_killed_or_stopped_ends_bit_for_bit_like_an_undisturbed_one(form: str, tmp_path: Path):
    """SIGKILL in the middle: the round begins again from the received moments. A pause: it goes on from its own."""
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    first_round(tmp_path, form, model, dataset)
    many = settings_of(form, steps=30)
    rounds_in([("quiet", following(tmp_path, "quiet", dataset, **many))])
    (process,) = started([*following(tmp_path, "killed", dataset, **many), "--progress"], tmp_path / "said")
    assert process.says("step ")
    process.kill()
    assert not (tmp_path / "killed" / "out").exists()
    rounds_in([("killed", following(tmp_path, "killed", dataset, **many))])
    stopped = many | {"limits": {"stop_after": 11}}
    rounds_in([("paused", following(tmp_path, "paused", dataset, **stopped))], expect=Outcome.CHECKPOINTED)
    rounds_in([("paused", following(tmp_path, "paused", dataset, **many))])
    assert read_report(tmp_path / "paused" / "out").details["interruptions"] == 1
    quiet = read_manifest(tmp_path / "quiet" / "out")
    assert has_moments(tmp_path / "quiet" / "out") and has_factors(tmp_path / "quiet" / "out")
    for name in ("killed", "paused"):
        found = read_manifest(tmp_path / name / "out")
        tensors = [each for each in quiet.files if each.endswith(".safetensors")]
        assert {each: found.files[each].sha256 for each in tensors} == {
            each: quiet.files[each].sha256 for each in tensors
        }, name
        same_moments(tmp_path / "quiet" / "out", tmp_path / name / "out", 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_paused_round_goes_on_under_another_layout_with_the_same_moments(form: str, tmp_path: Path):
    """One process, then two shards, then a pipeline; moments are sent after every second round, and this is one."""
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    first_round(tmp_path, form, model, dataset)
    every = settings_of(form, optimizer_state_every=2)
    rounds_in([("quiet", following(tmp_path, "quiet", dataset, **every))])

    def attempt(ranks: int, expect: int, **training: Any) -> None:
        rounds_in([("moved", following(tmp_path, "moved", dataset, **every | training))], ranks=ranks, expect=expect)

    attempt(1, Outcome.CHECKPOINTED, limits={"stop_after": 1})
    attempt(2, Outcome.CHECKPOINTED, limits={"stop_after": 3}, **TWO["fsdp"])
    attempt(2, 0, **TWO["1f1b"])
    assert read_report(tmp_path / "moved" / "out").details["interruptions"] == 2
    assert largest_difference(tmp_path / "quiet" / "out", tmp_path / "moved" / "out") < 1e-5
    same_moments(tmp_path / "quiet" / "out", tmp_path / "moved" / "out", 2e-2)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.slow)])
def test_a_pause_keeps_how_many_steps_the_moments_of_each_parameter_have_seen(
    ranks: int, optimizer: str, tmp_path: Path
):
    """A facility that comes later begins with the others' moments and their count of steps, but for those of a layer
    that they did not train. When it is paused, one count for all would make later gradients weigh less in these."""
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    training = {"optimizer": optimizer, "optimizer_state": "shared", "steps": 4}
    others = arguments(tmp_path / "first", model, dataset, freeze=["*layers.1*"], **training)
    rounds_in([("first", others)])
    received = tmp_path / "received"
    shutil.copytree(model, received)
    shutil.copytree(tmp_path / "first/out/second_moments", received / "second_moments")
    rounds_in([("quiet", arguments(tmp_path / "quiet", received, dataset, 1, **training))], ranks=ranks)
    stopped = training | {"limits": {"stop_after": 2}}
    paused = [("paused", arguments(tmp_path / "paused", received, dataset, 1, **stopped))]
    rounds_in(paused, ranks=ranks, expect=Outcome.CHECKPOINTED)
    rounds_in([("paused", arguments(tmp_path / "paused", received, dataset, 1, **training))], ranks=ranks)
    assert largest_difference(tmp_path / "quiet/out", tmp_path / "paused/out") == 0.0
