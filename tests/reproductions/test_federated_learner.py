"""Laws of the in-process federation that the quality experiment runs on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy
import pytest
import torch

from coordinator.aggregation.settings import AggregationSettings
from tests.bench.federated_baselines import pool
from tests.bench.federated_drift import Drift
from tests.bench.federated_learner import Learner, Local, Text, batches, perplexity, rounded
from tests.bench.federated_rounds import Federation, federate
from tests.pico import pico_config
from tests.reproductions.server_in_memory import Server

pytestmark = pytest.mark.slow  # no part of the product

LOCAL = Local(batch=4, learning_rate=1e-2, warmup_steps=2)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(pico_config(num_hidden_layers=1))


@pytest.fixture(scope="module")
def text() -> Text:
    rng = numpy.random.default_rng(0)
    rows = (numpy.cumsum(rng.integers(1, 4, size=(40, 16)), axis=1) % 128).astype(numpy.int32)
    return Text(train=rows[:32], validation=rows[32:])


def test_batches_pass_over_everything_before_they_repeat(text: Text):
    feed = batches(numpy.arange(10).reshape(10, 1), 4, seed=1)
    seen = torch.cat([next(feed) for _ in range(5)]).reshape(-1).tolist()
    assert sorted(seen[:10]) == list(range(10)) == sorted(seen[10:]) and seen[:10] != seen[10:]


def test_one_facility_and_the_plain_mean_are_training_that_is_rounded_every_round(model, text: Text):
    curve = federate(
        model,
        {"a": text},
        rounds=2,
        steps=3,
        local=LOCAL,
        aggregation=AggregationSettings(rule="mean"),
        seed=5,
        evaluate_rounds={1, 2},
    )
    alone = Learner(model, batches(text.train, 4, 5000), LOCAL, 6)
    for number in range(2):
        alone.load(rounded(alone.parameters))
        alone.train(3)
        alone.load(rounded(alone.parameters))
        assert curve.perplexities[number]["a"] == pytest.approx(perplexity(alone.model, text.validation), rel=1e-5)


def test_twice_the_same_facility_is_one(model, text: Text, monkeypatch: pytest.MonkeyPatch):
    from tests.bench import federated_rounds

    monkeypatch.setattr(federated_rounds, "batches", lambda blocks, size, seed: batches(blocks, size, 7))
    settings = {
        "rounds": 2,
        "steps": 2,
        "local": LOCAL,
        "seed": 1,
        "evaluate_rounds": {2},
        "aggregation": AggregationSettings(rule="nesterov", momentum=0.5),
    }
    one = federate(model, {"a": text}, **settings).perplexities[-1]["a"]
    two = federate(model, {"a": text, "b": text}, **settings).perplexities[-1]
    assert two["a"] == two["b"] == pytest.approx(one, rel=1e-4)


def test_training_learns_and_pooled_training_takes_the_same_tokens(model, text: Text):
    before = perplexity(model, text.validation)
    after = pool(model, {"a": text, "b": text}, steps=30, local=LOCAL, seed=1).perplexities[-1]["a"]
    assert after < 0.7 * before


def test_the_proximal_term_keeps_the_model_near(model, text: Text):
    def moved(proximal: float) -> float:
        learner = Learner(model, batches(text.train, 4, 1), Local(batch=4, learning_rate=1e-2, proximal=proximal), 10)
        learner.train(10)
        pairs = zip(learner.parameters, model.parameters(), strict=True)
        return sum(float((p.detach() - q.detach()).square().sum()) for p, q in pairs)

    assert moved(10.0) < 0.8 * moved(0.0)


def ends_of_twins(
    model: torch.nn.Module,
    text: Text,
    monkeypatch: pytest.MonkeyPatch,
    ways: Sequence[dict[str, Any]],
    rule: str = "mean",
) -> list[float]:
    """The last perplexity of two facilities that have the same text and batches, by each way of local training."""
    from tests.bench import federated_rounds

    monkeypatch.setattr(federated_rounds, "batches", lambda blocks, size, seed: batches(blocks, size, 7))
    return [
        federate(
            model,
            {"a": text, "b": text},
            rounds=3,
            steps=2,
            local=dataclasses.replace(LOCAL, **way),
            seed=1,
            evaluate_rounds=set(),
            aggregation=AggregationSettings(rule=rule),
        ).perplexities[-1]["a"]
        for way in ways
    ]


@pytest.mark.parametrize("local", [{"control": 1.0}, {"first_moments": "mean"}])
def test_what_brings_facilities_together_changes_nothing_where_all_are_the_same(model, text, monkeypatch, local):
    shared = {"optimizer_state": "shared"}
    ends = ends_of_twins(model, text, monkeypatch, [shared, shared | local], "nesterov")
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)


@pytest.mark.parametrize(
    ("shared", "same"),
    [({"form": "full"}, True), ({"form": "int8"}, False), ({"every": 3}, True), ({"blend": 0.0}, True)],
)
def test_second_moments_of_facilities_that_are_the_same_are_their_own(model, text, monkeypatch, shared, same):
    """In full exactly; in a byte a value nearly; and where they are shared after the last round alone, or not taken."""
    ends = ends_of_twins(model, text, monkeypatch, [{}, {"optimizer_state": "shared"} | shared])
    assert ends[0] == pytest.approx(ends[1], rel=1e-6 if same else 1e-2) and (same or ends[0] != ends[1])


def test_momentum_within_rounds_walks_on_in_the_direction_of_the_last_round(model, text: Text):
    local = dataclasses.replace(LOCAL, along=0.5)
    drift, learner = Drift(local), Learner(model, batches(text.train, 4, 1), local, 12)
    start = rounded(learner.parameters)
    drift.moved(start, [value + 0.25 for value in start], rates=2.0)
    drift.begin("a", learner, round=3)  # momentum 3 / 6
    assert all(torch.allclose(value, torch.full_like(value, 0.5 * 0.25 / 2)) for value in learner.shift)


def test_corrections_of_drift_sum_to_zero_over_the_facilities(model, text: Text):
    local = dataclasses.replace(LOCAL, control=1.0)
    drift = Drift(local)
    learners = {who: Learner(model, batches(text.train, 4, n), local, 12) for n, who in enumerate("abc")}
    start = rounded(next(iter(learners.values())).parameters)
    weights = {"a": 3.0, "b": 3.0, "c": 6.0}
    for round in range(2):
        for who, learner in learners.items():
            learner.load(start)
            drift.begin(who, learner, round)
            learner.train(3)
        drift.end(start, learners, weights)
    for who, learner in learners.items():
        drift.begin(who, learner, 2)
    for number, _ in enumerate(start):
        total = sum(weights[who] * learner.shift[number] for who, learner in learners.items())
        largest = max(float(learner.shift[number].abs().max()) for learner in learners.values())
        assert float(total.abs().max()) <= 1e-4 * max(largest, 1e-6) * 12


def test_a_late_facility_delivers_every_other_round_what_it_began_in_the_one_before(model, text: Text):
    federation = Federation(
        model,
        {"a": text, "b": text},
        rounds=4,
        steps=2,
        local=LOCAL,
        server=Server(AggregationSettings(rule="mean")),
        seed=1,
        unlike="late",
    )
    seen = []
    for number in range(1, 5):
        seen.append(sorted(federation.train(number)))
    assert seen == [["b"], ["a", "b"], ["b"], ["a", "b"]]
