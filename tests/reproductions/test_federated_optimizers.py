"""Laws of the experiments with other inner optimizers, and with rounds that some facilities miss."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from coordinator.aggregation.settings import AggregationSettings
from tests.bench.federated_baselines import pool
from tests.bench.federated_incomplete import WAYS, Outer
from tests.bench.federated_learner import Learner, Local, Text, batches
from tests.bench.federated_optimizers import averaged_kinds, share_state
from tests.bench.federated_rounds import federate
from tests.reproductions.test_federated_learner import LOCAL, ends_of_twins, model, text

__all__ = ["model", "text"]
pytestmark = pytest.mark.slow  # no part of the product
MEANS: list[dict[str, Any]] = [
    {"optimizer": "muon", "first_moments": "mean"},
    {"optimizer": "muon", "first_moments": "mean", "optimizer_state": "shared", "form": "full"},
    {"optimizer": "adafactor", "optimizer_state": "shared"},
]


@pytest.mark.parametrize("local", MEANS)
def test_averaging_the_state_of_facilities_that_are_the_same_changes_nothing(model, text: Text, monkeypatch, local):
    ends = ends_of_twins(model, text, monkeypatch, [{"optimizer": local["optimizer"]}, local])
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)


@pytest.mark.parametrize("local", MEANS)
def test_the_state_that_is_averaged_is_the_weighted_mean(model, text: Text, local):
    """Corrected for the bias of running means, which is the same where all have made as many steps."""
    settings = dataclasses.replace(LOCAL, **local)
    learners = [Learner(model, batches(text.train, 4, seed), settings, 4) for seed in (1, 2)]
    for learner in learners:
        learner.train(2)

    def states(learner: Learner) -> dict[tuple[int, str], torch.Tensor]:
        return {
            (number, kind): learner.optimizer.state[parameter][kind].clone()
            for number, parameter in enumerate(learner.parameters)
            for kind in averaged_kinds(settings)
            if kind in learner.optimizer.state[parameter]
        }

    before = [states(learner) for learner in learners]
    share_state(learners, [3.0, 1.0], learners)
    for learner in learners:
        for place, value in states(learner).items():
            wanted = 0.75 * before[0][place] + 0.25 * before[1][place]
            assert torch.allclose(value, wanted, rtol=1e-5, atol=1e-6 * float(wanted.abs().max())), place
    assert len(before[0]) >= len(learners[0].parameters)


@pytest.mark.parametrize("way", WAYS)
def test_where_nobody_is_absent_the_server_does_what_it_does_anyway(model, text: Text, way: str):
    keys: dict[str, Any] = {"rounds": 3, "steps": 2, "local": LOCAL, "seed": 1, "evaluate_rounds": set()}
    settings = AggregationSettings(rule="nesterov", momentum=0.5)
    ends = [federate(model, {"a": text, "b": text}, aggregation=settings, incomplete=one, **keys) for one in ("", way)]
    assert ends[0].perplexities[-1] == pytest.approx(ends[1].perplexities[-1], rel=1e-6)


STEPS = {"": 1.0, "rate": 0.5, "both": 0.5, "zero": 0.5, "last": 1.5, "fading": 1.0, "corrected": 2.0}
"""How far the model moves in a round of b alone, which walks 1 where a, in the round before, walked 2."""


@pytest.mark.parametrize(("way", "moved"), STEPS.items())
def test_what_a_server_does_in_a_round_that_one_of_two_misses(way: str, moved: float):
    server = Outer(AggregationSettings(rule="mean"), 9, facilities=2, incomplete="" if way == "both" else way)
    if way == "both":  # the plain server has no momentum to make smaller
        server = Outer(AggregationSettings(rule="nesterov", momentum=0.0), 9, facilities=2, incomplete=way)
    base = {"w": torch.zeros(3)}
    server.step(base, {"a": {"w": base["w"] + 2}, "b": {"w": base["w"]}}, {"a": 1.0, "b": 1.0})
    begun = torch.from_numpy(server.master["w"]).clone()
    after = server.step({"w": begun}, {"b": {"w": begun + 1}}, {"b": 1.0})["w"]
    assert torch.allclose(after - begun, torch.full((3,), moved), atol=1e-6)


def test_pooled_training_over_absent_facilities_takes_the_batches_of_those_there(model, text: Text, monkeypatch):
    from tests.bench import federated_baselines

    taken: list[int] = []

    class Counting(Learner):
        def train(self, steps: int, span: int | None = None) -> float:
            taken.extend(len(next(self.loader)) // self.local.batch for _ in range(steps))
            return 0.0

    monkeypatch.setattr(federated_baselines, "Learner", Counting)
    local = Local(batch=4)
    pool(model, {"a": text, "b": text}, steps=6, local=local, seed=1, unlike="absent", span=2)
    assert taken == [1, 1, 1, 1, 2, 2]
    taken.clear()
    pool(model, {"a": text, "b": text}, steps=6, local=local, seed=1, unlike="steps", span=3)
    assert taken == [2, 1, 1, 2, 1, 1]
    taken.clear()
    pool(model, {"a": text, "b": text}, steps=3, local=local, seed=1)
    assert taken == [2, 2, 2]
