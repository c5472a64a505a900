"""Law: twenty rounds over files move the float32 master as the papers' equations do in float64, whoever is there."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch

from coordinator.aggregation.rebase import rebase
from coordinator.aggregation.settings import AggregationSettings, ScreenSettings
from tests.aggregation import make
from tests.aggregation.make import aggregate

SHAPES = {"embed.weight": (16, 6), "a.weight": (9, 11), "b.bias": (5,)}
ROUNDS = 20
RATE, MOMENTUM, BETA2, TAU = 0.02, 0.7, 0.95, 1e-3


def flat(tensors: make.Tensors) -> np.ndarray:
    return np.concatenate([tensors[name].double().numpy().reshape(-1) for name in SHAPES])


def moved_by(optimizer: str, number: int, slots: list[np.ndarray], step: np.ndarray) -> tuple[np.ndarray, list]:
    """What the master moves by, and the next slots."""
    if optimizer == "nesterov":
        momentum = min(MOMENTUM, number / (number + 3))
        velocity = momentum * slots[0] + step
        return RATE * (step + momentum * velocity), [velocity]
    first, second = MOMENTUM * slots[0] + (1 - MOMENTUM) * step, slots[1]
    if optimizer == "fedadam":
        second = BETA2 * second + (1 - BETA2) * step**2
    else:
        second = second - (1 - BETA2) * step**2 * np.sign(second - step**2)
    return RATE * first / (np.sqrt(second) + TAU), [first, second]


def capped(weights: np.ndarray) -> np.ndarray:
    """Shares of which one at most is above a half: it is brought down to it."""
    shares = weights / weights.sum()
    largest = shares.argmax()
    if shares[largest] <= 0.5:
        return shares
    shares *= 0.5 / (1 - shares[largest])
    shares[largest] = 0.5
    return shares


@pytest.mark.parametrize(
    ("rule", "optimizer", "dtype"),
    [
        ("mean", "nesterov", torch.bfloat16),
        pytest.param("median", "fedyogi", torch.float16, marks=pytest.mark.slow),
        ("mean", "fedadam", torch.float32),
    ],
)
def test_the_master_is_that_of_the_equations_in_float64(tmp_path: Path, rule: str, optimizer: str, dtype: torch.dtype):
    """Facilities miss rounds, come late, weigh unlike and are clipped; the state is read back in every round."""
    draw, noise = random.Random(rule + optimizer), torch.Generator().manual_seed(1)
    rates = {"server_learning_rate": RATE, "momentum": MOMENTUM, "beta2": BETA2, "tau": TAU}
    settings = AggregationSettings(
        rule=f"{rule}+{optimizer}", maximum_staleness=2, screen=ScreenSettings(action="report"), **rates
    )
    tensors = make.random_tensors(0, SHAPES, dtype, 0.5)
    models, state = [make.model(tmp_path / "m0", tensors)], None
    master = flat(tensors)
    starts = [0.0] if optimizer == "nesterov" else [0.0, TAU**2]
    slots = [np.full_like(master, start) for start in starts]
    for number in range(ROUNDS):
        paths, steps, weights = {}, [], []
        for who in sorted(draw.sample("abcdef", draw.randint(3, 6))):
            late = min(number, draw.choice([0, 0, 0, 1, 2]))
            began, tokens = models[number - late], draw.choice([30, 100, 1000])
            before, length = make.read_all(began), 10 ** draw.uniform(-2.5, -1.5)
            after = {
                n: (t.float() + torch.randn(t.shape, generator=noise) * length).to(dtype) for n, t in before.items()
            }
            path = make.update(tmp_path / f"{who}{number}", after, base=began, facility=who, tokens=tokens)
            if late:
                paths[who] = tmp_path / f"{who}{number}-now"
                rebase(path, then=began, now=models[-1], out=paths[who], facility=who)
            steps.append(flat(after) - flat(before))
            weights.append(tokens / (1 + late) ** 0.5)
            paths.setdefault(who, path)
        out, kept = tmp_path / f"m{number + 1}", tmp_path / f"s{number + 1}"
        aggregate(base=models[-1], updates=paths, out=out, settings=settings, state_in=state, state_out=kept)
        norms = [float(np.linalg.norm(step)) for step in steps]
        clipped = np.array([s * min(1.0, median(norms) / norm) for s, norm in zip(steps, norms, strict=True)])
        combined = capped(np.array(weights)) @ clipped if rule == "mean" else np.median(clipped, axis=0)
        change, slots = moved_by(optimizer, number, slots, combined)
        master = master + change
        models.append(out)
        state = kept
        found = make.read_all(kept / "master")
        assert np.abs(flat(found) - master).max() < 2e-6 * np.abs(master).max(), number
        sent = make.read_all(out)
        assert all(torch.equal(sent[name], found[name].to(dtype)) for name in SHAPES)
