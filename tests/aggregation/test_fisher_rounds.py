"""Law: nine rounds by fisher, over files, with absent and late facilities, are those of a plain loop in float64."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.aggregation.rebase import rebase
from coordinator.aggregation.settings import AggregationSettings
from facility.exchange.checkpoints.second_moments import Factors, read_factors
from tests.aggregation import make
from tests.aggregation.make import aggregate
from tests.aggregation.test_fisher import ALL, by_hand, with_factors
from tests.aggregation.test_many_rounds import capped

SHAPES = {"embed": (30, 40), "norm": (50,), "cube": (4, 3, 5)}
ROUNDS, RATE, MOMENTUM, KEPT, FALL = 9, 0.3, 0.7, 0.6, 0.4
Moments = dict[str, list[np.ndarray]]
"""Row and column means by tensor."""


class Rounds:
    """Five facilities, some of which are absent or a round late, with gradients of their own in every row."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.draw, self.noise = root, random.Random(seed), np.random.default_rng(seed)
        self.models = [make.model(root / "m0", make.random_tensors(seed, SHAPES, torch.bfloat16, 0.5))]
        self.shared: list[Moments | None] = [None]

    def train(self, name: str, late: int) -> tuple[Path, dict[str, Any]]:
        """An update, and what a plain loop knows of it."""
        number = len(self.models) - 1
        began, received = self.models[number - late], self.shared[number - late]
        before, tokens = make.read_all(began), self.draw.choice([100, 200, 300])
        after = {
            n: (t.double() + torch.from_numpy(self.noise.normal(0, 0.01, t.shape))).bfloat16()
            for n, t in before.items()
        }
        fallen = FALL ** (number - late)  # as gradients do at first
        own = {n: fallen * self.noise.lognormal(sigma=0.3, size=(s[0], math.prod(s[1:]))) for n, s in SHAPES.items()}
        means = {n: [g.mean(1), g.mean(0)] for n, g in own.items()}
        kept, present = KEPT if received is not None else 0.0, self.shared[number]
        sent = {
            n: [(1 - kept) * m + (kept * received[n][i] if received else 0.0) for i, m in enumerate(pair)]
            for n, pair in means.items()
        }
        path = make.update(self.root / f"{name}{number}", after, base=began, facility=name, tokens=tokens)
        stored = {n: [one.astype("f4") for one in pair[: len(SHAPES[n][:2])]] for n, pair in sent.items()}
        with_factors(path, {n: Factors(*pair) for n, pair in stored.items()}, kept)
        if received is not None and present is not None:
            sent = {n: [one + kept * (present[n][i] - received[n][i]) for i, one in enumerate(sent[n])] for n in sent}
        if late:
            now = path.with_name(f"{path.name}-now")
            rebase(path, then=began, now=self.models[-1], out=now, facility=name)
            path = now
        return path, {
            "step": {n: after[n].double().numpy() - before[n].double().numpy() for n in SHAPES},
            "weight": tokens / math.sqrt(1 + late),
            "squares": {n: pair[0] for n, pair in means.items()},
            "sent": sent,
        }


def combined(told: list[dict[str, Any]], weights: np.ndarray) -> dict[str, np.ndarray]:
    """The steps, clipped to their median norm, weighed row by row."""
    norms = [math.sqrt(sum(float(np.square(d).sum()) for d in one["step"].values())) for one in told]
    few = len(told) < 3
    scales = [1.0 if few else min(1.0, median(norms) / norm) for norm in norms]
    found = {}
    for name, shape in SHAPES.items():
        steps = np.stack([one["step"][name].reshape(shape[0], -1) * s for one, s in zip(told, scales, strict=True)])
        squares = np.stack([one["squares"][name] for one in told])
        found[name] = by_hand(steps, squares, list(weights), 0.5, math.inf if few else 2.0).reshape(shape)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_master_and_the_shared_moments_are_those_of_the_plain_loop(tmp_path: Path, seed: int):
    rounds, state = Rounds(tmp_path, seed), None
    master = {name: one.double().numpy() for name, one in make.read_all(rounds.models[0]).items()}
    velocity = {name: np.zeros_like(one) for name, one in master.items()}
    settings = AggregationSettings(
        rule="fisher+nesterov", fisher_tensors=ALL, server_learning_rate=RATE, momentum=MOMENTUM, maximum_staleness=2
    )
    for number in range(ROUNDS):
        there = sorted(rounds.draw.sample("abcde", rounds.draw.choice([2, 4, 5])))
        lates = [min(number, rounds.draw.choice([0, 0, 0, 1])) if len(there) > 2 else 0 for _ in there]
        made = {name: rounds.train(name, late) for name, late in zip(there, lates, strict=True)}
        told, weights = [one for _, one in made.values()], np.array([one["weight"] for _, one in made.values()])
        weights = capped(weights) if len(there) > 2 else weights / weights.sum()
        momentum, out = min(MOMENTUM, number / (number + 3)), tmp_path / f"m{number + 1}"
        for name, step in combined(told, weights).items():
            velocity[name] = momentum * velocity[name] + step
            master[name] = master[name] + RATE * (step + momentum * velocity[name])
        paths, after = {name: path for name, (path, _) in made.items()}, tmp_path / f"s{number + 1}"
        aggregate(base=rounds.models[-1], updates=paths, out=out, settings=settings, state_in=state, state_out=after)
        state = after
        rounds.models.append(out)
        sums = {
            n: [sum(w * o["sent"][n][i] for w, o in zip(weights, told, strict=True)) for i in (0, 1)] for n in SHAPES
        }
        rounds.shared.append(sums)
        found, shared = make.read_all(state / "master"), read_factors(out, SHAPES)[0]
        for name, wanted in master.items():
            assert np.abs(found[name].double().numpy() - wanted).max() < 1e-6, (number, name)
            assert np.allclose(shared[name].rows, sums[name][0], rtol=1e-6), (number, name)
