"""Models compared block by block: figures are those of a plain evaluation, and their intervals those of a bootstrap."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from facility.exchange.errors import ManifestError
from facility.exchange.files.links import link_tree
from facility.exchange.messages.comparison import (
    FOLDERS,
    KEY,
    MODELS,
    Figure,
    Interval,
    figures_of,
    missing_of,
    perplexity_interval,
    tasks_of,
)
from facility.exchange.messages.evaluation import SCORES, scores_of
from facility.exchange.messages.manifest import Manifest, read_manifest, write_manifest
from facility.exchange.messages.report import read_report
from facility.training import comparison
from facility.training.bootstrap import BlockLosses, loss_difference, mean_loss_interval
from facility.training.comparison import Data, accuracy_score, unbelievable
from tests.pico import save_pico
from tests.training.federation import write_dataset
from tests.training.layouts import arguments, rounds_in

PREDICTIONS = 10 * 15
"""Of ten blocks of 16 tokens."""


def write_models(directory: Path, models: dict[str, Path]) -> Path:
    """A directory of models, as the coordinator sends it after two rounds."""
    directory.mkdir()
    for name, model in models.items():
        link_tree(model, directory / name)
        write_manifest(directory / name, Manifest(kind="model", federation="pico", round=0))
    manifest = Manifest(kind=MODELS, federation="pico", round=2, extra={FOLDERS: list(models)})
    write_manifest(directory, manifest)
    return directory


def found(out: Path, models: list[str]) -> dict[tuple[str, bool], Figure]:
    return {(one.model, one.held_out): one for one in figures_of(read_manifest(out), models)}


@pytest.mark.slow
def test_figures_are_those_of_a_plain_evaluation_whatever_the_layout(tmp_path: Path, pico_llama: Path):
    dataset, held_out = write_dataset(tmp_path / "data"), write_dataset(tmp_path / "held", validation=6, seed=9)
    other = save_pico(tmp_path / "other", seed=5)
    models = write_models(tmp_path / "models", {"global": pico_llama, "initial": other, "update.a": pico_llama})
    names = ["global", "initial", "update.a"]

    def case(name: str, model: Path, **training: object) -> tuple[str, list[str]]:
        given = arguments(tmp_path / name, model, dataset, rounds=2, round=2, **training)
        settings = Path(given[given.index("--settings") + 1])
        told = json.loads(settings.read_text()) | {"evaluation": {"held_out": str(held_out)}}
        settings.write_text(json.dumps(told))
        return name, given

    rounds_in([case("plain", pico_llama), case("plain-other", other), case("one", models)])
    rounds_in([case("two", models), case("stages", models, layout={"stages": 2})], ranks=2)
    plain = {name: read_report(tmp_path / name / "out").loss_received for name in ("plain", "plain-other")}
    for place in ("one", "two", "stages"):
        figures = found(tmp_path / place / "out", names)
        assert {model for model, _ in figures} == set(names) and len(figures) == 6
        assert figures["global", False].loss.value == pytest.approx(plain["plain"], abs=1e-6)
        assert figures["initial", False].loss.value == pytest.approx(plain["plain-other"], abs=1e-6)
        assert {(one.blocks, one.predictions) for (_, held), one in figures.items() if not held} == {(10, PREDICTIONS)}
        assert {one.blocks for (_, held), one in figures.items() if held} == {6}
        same = figures["update.a", False].against["global"]
        assert (same.value, same.low, same.high) == (0.0, 0.0, 0.0)
        apart = figures["initial", True].against["global"]
        assert apart.value == pytest.approx(figures["initial", True].loss.value - figures["global", True].loss.value)
    one, two = found(tmp_path / "one" / "out", names), found(tmp_path / "two" / "out", names)
    for key, figure in one.items():
        assert (figure.loss.low, figure.loss.high) == pytest.approx((two[key].loss.low, two[key].loss.high), abs=1e-5)
    told = (tmp_path / "one" / "out" / "manifest.json").read_text()
    kept = json.loads(next((tmp_path / "one" / "state" / "comparison").rglob("global-*.json")).read_text())
    assert not any(repr(loss) in told for loss in kept["losses"])  # losses of single blocks stay


def test_intervals_are_those_of_the_textbook_for_many_blocks():
    """With as many predictions in each block the mean is plain, and its interval the normal one."""
    draw = np.random.Generator(np.random.PCG64(3))
    losses = draw.normal(30.0, 4.0, 4000)
    one = BlockLosses(losses=losses, predictions=np.full(4000, 10))
    told = mean_loss_interval(one)
    error = 1.96 * losses.std() / 10 / math.sqrt(4000)
    assert told.value == pytest.approx(losses.mean() / 10)
    assert (told.value - told.low, told.high - told.value) == pytest.approx((error, error), rel=0.12)


def test_a_difference_on_the_same_blocks_is_narrower_than_both_and_turns_its_sign():
    draw = np.random.Generator(np.random.PCG64(4))
    hard, predictions = draw.normal(30.0, 8.0, 200), draw.integers(5, 15, 200)
    one = BlockLosses(losses=hard + draw.normal(0.5, 0.1, 200), predictions=predictions)
    other = BlockLosses(losses=hard, predictions=predictions)
    told, turned = loss_difference(one, other), loss_difference(other, one)
    assert told.low > 0 and (turned.low, turned.value, turned.high) == pytest.approx(
        (-told.high, -told.value, -told.low)
    )
    width = mean_loss_interval(one).high - mean_loss_interval(one).low
    assert told.high - told.low < width / 10
    assert mean_loss_interval(one) == mean_loss_interval(one)  # the draws are fixed


def test_one_block_has_an_interval_without_width():
    told = mean_loss_interval(BlockLosses(losses=np.array([6.0]), predictions=np.array([3])))
    assert (told.value, told.low, told.high) == (2.0, 2.0, 2.0)
    assert perplexity_interval(told) == pytest.approx((math.exp(2.0),) * 3)


GOOD = {
    "model": "global",
    "held_out": False,
    "loss": {"value": 2.0, "low": 1.9, "high": 2.1},
    "blocks": 3,
    "predictions": 40,
    "against": {"initial": {"value": -0.5, "low": -0.6, "high": -0.4}},
}


@pytest.mark.parametrize(
    "change",
    [
        {"model": "update.b"},
        {"model": ["global"]},
        {"loss": {"value": 2.0, "low": 2.1, "high": 1.9}},
        {"loss": {"value": -2.0, "low": -2.1, "high": -1.9}},
        {"loss": {"value": float("inf"), "low": 1.0, "high": 2.0}},
        {"blocks": 0},
        {"predictions": 1.5},
        {"against": {"update.a": {"value": 0.0, "low": 0.0, "high": 0.0}}},
        {"against": {"initial": {"value": 0.0}}},
        {"text": "a sentence of the validation data"},
    ],
)
def test_only_figures_are_taken(change: dict[str, object]):
    def told(figure: dict[str, object]) -> Manifest:
        return Manifest(kind="update", federation="f", round=2, extra={"comparison": {"figures": [figure]}})

    assert figures_of(told(GOOD), ["global"])[0].loss.value == 2.0
    with pytest.raises(ManifestError):
        figures_of(told(GOOD | change), ["global"])


def test_the_accuracy_that_a_facility_tells_is_what_its_coordinator_takes():
    loader: Any = None
    told = [
        accuracy_score("global", Data(loader=loader, held_out=held_out, digest=""), 0.75, 48)
        for held_out in (False, True)
    ]

    def of(**extra: Any) -> Manifest:
        return Manifest(kind="update", federation="pico", round=2, extra=extra)

    assert tasks_of(of(**{KEY: {"tasks": told}}), ["global"]) == told
    assert [one["stderr"] for one in told] == [0.0625, 0.0625]
    for change in ({"metric": "acc"}, {"value": 1.5}, {"value": -0.5}, {"stderr": 2.0}):
        for one in told:
            with pytest.raises(ManifestError):
                tasks_of(of(**{KEY: {"tasks": [one | change]}}), ["global"])
    for one in told:  # of a round these are no tasks
        assert scores_of(of(**{SCORES: {"results": [{k: v for k, v in one.items() if k != "model"}]}})) == {}


def test_every_evaluation_of_a_comparison_is_a_sign_of_life(monkeypatch: pytest.MonkeyPatch):
    """None was given from the first model on, and a job without one for half an hour is reported as stuck."""
    seen: list[str] = []
    engine = SimpleNamespace(
        assembly=None, accuracy=None, evaluate_blocks=lambda *_: seen.append("blocks") or (np.ones(1), np.ones(1, int))
    )
    names = {"read_manifest", "open_checkpoint", "load_weights", "KeptLosses"}
    for name in names:
        monkeypatch.setattr(comparison, name, lambda *_: SimpleNamespace(content_sha256=""))
    data = SimpleNamespace(loader=SimpleNamespace(blocks=list, evaluated=1), held_out=False)
    monkeypatch.setattr(comparison, "data_sets", lambda _: [data, data])
    monkeypatch.setattr(comparison, "models_of", lambda *_: {"a": Path("a"), "b": Path("b")})
    request = SimpleNamespace(bundle=Path("models"), state=Path("state"), settings=SimpleNamespace(seed=1))
    ranks = SimpleNamespace(first=False, world=1)
    monkeypatch.setattr(comparison, "agree_on_failure", lambda _: contextlib.nullcontext())
    comparison.compare_models(
        cast(Any, SimpleNamespace(request=request, ranks=ranks, engine=engine, inputs=None, show=seen.append))
    )
    assert seen == ["evaluating", "blocks"] * 4


def test_a_model_without_a_loss_costs_the_others_no_figure(tmp_path: Path, pico_llama: Path):
    """One whose weights are finite and make a forward pass overflow."""
    wild = tmp_path / "wild"
    shutil.copytree(pico_llama, wild)
    tensors = load_file(wild / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)
    tensors["lm_head.weight"] *= 3e38 / tensors["lm_head.weight"].abs().max()
    save_file(tensors, wild / "model.safetensors", {"format": "pt"})
    models = write_models(tmp_path / "models", {"global": pico_llama, "update.b": wild, "initial": pico_llama})
    rounds_in([("one", arguments(tmp_path / "one", models, write_dataset(tmp_path / "data"), rounds=2, round=2))])
    out = read_manifest(tmp_path / "one" / "out")
    assert {one.model for one in figures_of(out, ["global", "update.b", "initial"])} == {"global", "initial"}
    assert "its loss is nan" in missing_of(out, ["global", "update.b", "initial"])["update.b"]


def test_what_no_message_can_tell_is_known_before():
    for losses, predictions in (([math.nan, 1.0], [1, 1]), ([2e4, 0.0], [1, 1]), ([0.0, 0.0], [0, 0])):
        one = BlockLosses(losses=np.array(losses), predictions=np.array(predictions))
        told = Figure(model="update.b", loss=mean_loss_interval(one), blocks=2, predictions=2)
        assert "expected a number up to 10000" in unbelievable(told)
    assert not unbelievable(
        Figure(model="global", loss=Interval(value=1.0, low=0.0, high=1e4), blocks=2, predictions=2)
    )
