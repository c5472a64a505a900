"""Law: rounds of every rule, over files, move the master as a plain loop in float64 does, by the papers alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.aggregation.rebase import rebase
from coordinator.aggregation.rules import dare
from coordinator.aggregation.settings import AggregationSettings
from tests.aggregation import make
from tests.aggregation.make import aggregate
from tests.aggregation.test_many_rounds import capped
from tests.cases import slow_but
from tests.examples import THOROUGH

SHAPES: dict[str, tuple[int, ...]] = {
    "embed.weight": (16, 6),
    "a.weight": (9, 11),
    "b.bias": (5,),
    "one": (),
    "none": (0, 3),
}
ENDS = np.cumsum([int(np.prod(shape)) for shape in SHAPES.values()])
PLACES = {name: slice(end - int(np.prod(SHAPES[name])), end) for name, end in zip(SHAPES, ENDS, strict=True)}
ROUNDS = 8 if THOROUGH else 4
RATE, MOMENTUM, BETA2, TAU, GAMMA, DENSITY = 0.3, 0.7, 0.95, 1e-3, 0.5, 0.2
OPTIMIZERS = ("plain", "nesterov", "fedavgm", "slowmo", "fedadam", "fedyogi", "fedadagrad")


def flat(tensors: make.Tensors) -> np.ndarray:
    return np.concatenate([tensors[name].double().numpy().reshape(-1) for name in SHAPES])


class Told:
    """What a round's rule knows: clipped steps (updates, values), as they were before, and the rest by update."""

    def __init__(self, steps: np.ndarray, weights: np.ndarray, **more: Any) -> None:
        norms = np.linalg.norm(steps, axis=1)
        self.factors = np.minimum(1.0, median(norms.tolist()) / norms)
        self.raw, self.steps, self.weights = steps, steps * self.factors[:, None], weights
        self.names, self.late = more["names"], more["late"]
        self.number, self.velocity = more["number"], more["velocity"]


def krum_order(told: Told) -> np.ndarray:
    squares = np.square(told.steps[:, None] - told.steps[None]).sum(-1)
    near = max(1, len(told.steps) - 2)
    return np.argsort([np.sort(np.delete(row, i))[:near].sum() for i, row in enumerate(squares)], kind="stable")


def geometric_median(told: Told) -> np.ndarray:
    shares = told.weights
    for _ in range(8):
        shares = told.weights / np.linalg.norm(told.steps - shares @ told.steps, axis=1)
        shares = shares / shares.sum()
    return np.asarray(shares @ told.steps)


def ties(told: Told) -> np.ndarray:
    """Thresholds on the grid of bfloat16."""
    kept = np.zeros_like(told.steps)
    for row, raw, factor, out in zip(told.steps, told.raw, told.factors, kept, strict=True):
        least = np.sort(np.abs(raw).astype(np.float32))[-int(np.ceil(DENSITY * len(raw)))]
        grid = (least.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        out[:] = np.where(np.abs(row) >= grid * factor * (1 - 1e-7), row, 0)
    weighted = kept * told.weights[:, None]
    agree = (np.sign(kept) == np.sign(weighted.sum(0))) & (kept != 0)
    mass = (agree * told.weights[:, None]).sum(0)
    return np.divide((agree * weighted).sum(0), mass, out=np.zeros(len(mass)), where=mass > 0)


def dropped(told: Told) -> np.ndarray:
    """The choice alone is the rule's own, whose law is in `test_rules`."""
    total = np.zeros(ENDS[-1])
    for step, weight, facility in zip(told.steps, told.weights, told.names, strict=True):
        for name, place in PLACES.items():
            mask = dare.kept(0, told.number, facility, name, 0, place.stop - place.start, DENSITY)
            total[place] += weight / DENSITY * step[place] * mask
    return total


def radial_directional(told: Told) -> np.ndarray:
    total = told.weights @ told.steps
    for name, place in PLACES.items():
        steps = told.steps[:, place]
        norms = np.linalg.norm(steps, axis=1)
        direction = np.divide(told.weights, norms, out=np.zeros(len(norms)), where=norms > 0) @ steps
        if not name.startswith("embed") and np.linalg.norm(direction) > 1e-3:
            total[place] = direction / np.linalg.norm(direction) * (told.weights @ norms)
    return np.asarray(total)


def heloco(told: Told) -> np.ndarray:
    return np.asarray(
        sum(
            weight * np.concatenate([turned(step[p], told.velocity[p]) if late else step[p] for p in PLACES.values()])
            for step, weight, late in zip(told.steps, told.weights, told.late, strict=True)
        )
    )


def turned(step: np.ndarray, momentum: np.ndarray) -> np.ndarray:
    length, other = np.linalg.norm(step), np.linalg.norm(momentum)
    if not length or not other:
        return step
    cosine, confidence = step @ momentum / length / other, length / (length + 3 * other + 1e-8)
    if cosine >= 0.2:
        return step
    if cosine < 0:
        return step - min(-cosine * confidence / 2, 0.5) * cosine * length * momentum / other
    share = min((1 - cosine) * confidence, 1)
    mixed = (1 - share) * step / length + share * momentum / other
    return np.asarray(length * mixed / np.linalg.norm(mixed))


def trimmed_mean(told: Told) -> np.ndarray:
    return np.asarray(np.sort(told.steps, axis=0)[1:-1].mean(0))


RULES: dict[str, Callable[[Told], np.ndarray]] = {
    "mean": lambda told: told.weights @ told.steps,
    "median": lambda told: np.median(told.steps, axis=0),
    "trimmed_mean": trimmed_mean,
    "krum": lambda told: told.steps[krum_order(told)[0]],
    "multi_krum": lambda told: told.steps.mean(0),
    "bulyan": lambda told: told.steps.mean(0),
    "geometric_median": geometric_median,
    "ties": ties,
    "dare": dropped,
    "radial_directional": radial_directional,
    "heloco": heloco,
}


def starts(optimizer: str) -> list[float]:
    return [0.0, TAU**2] if optimizer in OPTIMIZERS[4:] else [] if optimizer == "plain" else [0.0]


def moved(optimizer: str, number: int, slots: list[Any], step: np.ndarray, rate: float) -> tuple[np.ndarray, list[Any]]:
    """What the master moves by, and the next slots."""
    if optimizer == "plain":
        return rate * step, []
    if optimizer == "slowmo":
        return rate * (GAMMA * MOMENTUM * slots[0] + step), [MOMENTUM * slots[0] + step / GAMMA]
    if optimizer in ("nesterov", "fedavgm"):
        momentum = min(MOMENTUM, number / (number + 3)) if optimizer == "nesterov" else MOMENTUM
        velocity = momentum * slots[0] + step
        return rate * (step + momentum * velocity if optimizer == "nesterov" else velocity), [velocity]
    first, second, square = MOMENTUM * slots[0] + (1 - MOMENTUM) * step, slots[1], step**2
    second = {
        "fedadam": BETA2 * second + (1 - BETA2) * square,
        "fedyogi": second - (1 - BETA2) * square * np.sign(second - square),
        "fedadagrad": second + square,
    }[optimizer]
    return rate * first / (np.sqrt(second) + TAU), [first, second]


class Rounds:
    """A federation of six, over files: some are absent, late, or bring a value that is not finite."""

    def __init__(self, root: Path, dtype: torch.dtype, seed: str) -> None:
        self.root, self.dtype, self.draw = root, dtype, random.Random(seed)
        self.noise = torch.Generator().manual_seed(len(seed))
        self.models = [make.model(root / "m0", make.random_tensors(0, SHAPES, dtype, 0.5))]
        self.state: Path | None = None
        self.master = flat(make.read_all(self.models[0]))

    def updates(self, velocity: Any) -> tuple[dict[str, Path], Told]:
        number, draw, paths = len(self.models) - 1, self.draw, dict[str, Path]()
        steps, weights, names, lates = [], [], [], []
        who = sorted(draw.sample("abcdef", draw.randint(4, 6)))
        broken = draw.choice([*who, *who, ""]) if number % 2 else ""
        for name in who:
            late, tokens = min(number, draw.choice([0, 0, 0, 1, 2])), draw.choice([30, 100, 1000])
            before, size = make.read_all(self.models[number - late]), 10 ** draw.uniform(-2.3, -1.7)
            after = {
                n: (t.float() + torch.randn(t.shape, generator=self.noise) * size).to(self.dtype)
                for n, t in before.items()
            }
            if name == broken:
                after["a.weight"][0, 0] = float(draw.choice(["nan", "inf"]))
            began = self.models[number - late]
            path = make.update(self.root / f"{name}{number}", after, base=began, facility=name, tokens=tokens)
            paths[name] = path if not late else path.with_name(f"{name}{number}-now")
            if late:
                rebase(path, then=began, now=self.models[-1], out=paths[name], facility=name)
            if name != broken:
                steps.append(flat(after) - flat(before))
                weights.append(tokens / (1 + late) ** 0.5)
                names.append(name)
                lates.append(late)
        shares = capped(np.array(weights))
        return paths, Told(np.array(steps), shares, names=names, late=lates, number=number, velocity=velocity)

    def close(self, paths: dict[str, Path], rule: str, rate: float) -> np.ndarray:
        """The float32 master of the next model, which is that rounded once."""
        number = len(self.models)
        settings = AggregationSettings(
            rule=rule,
            server_learning_rate=rate,
            momentum=MOMENTUM,
            beta2=BETA2,
            tau=TAU,
            slowmo_learning_rate=GAMMA,
            maximum_staleness=2,
            screen={"action": "report"},  # type: ignore[arg-type]
        )
        out, kept = self.root / f"m{number}", self.root / f"s{number}"
        more = {"state_in": self.state, "state_out": kept, "drop_refused": True, "threads": self.draw.choice([1, 2])}
        aggregate(base=self.models[-1], updates=paths, out=out, settings=settings, **more)
        self.models.append(out)
        self.state = kept
        found, sent = make.read_all(kept / "master"), make.read_all(out)
        assert all(torch.equal(sent[name], found[name].to(self.dtype)) for name in SHAPES)
        return flat(found)


def pairs() -> list[Any]:
    """Every rule with two optimizers, so that every optimizer has several."""
    beside = [name for name in RULES if name != "heloco"]
    first = [(rule, OPTIMIZERS[i % 7]) for i, rule in enumerate(beside)]
    second = [(rule, OPTIMIZERS[(i + 4) % 7]) for i, rule in enumerate(beside)]
    quick = [*first, ("heloco", "nesterov")]
    return slow_but(quick, [*quick, *second, ("heloco", "fedavgm")])


@pytest.mark.parametrize("pair", pairs(), ids="-".join)
def test_the_master_is_that_of_the_plain_loop_whoever_is_there(tmp_path: Path, pair: tuple[str, str]):
    """From the middle on at half the rate, as the guard makes it; what rounding takes is not lost."""
    rule, optimizer = pair
    dtype = (torch.bfloat16, torch.float16, torch.float32)[len(rule + optimizer) % 3]
    rounds = Rounds(tmp_path, dtype, rule + optimizer)
    slots: list[Any] = [np.full_like(rounds.master, start) for start in starts(optimizer)]
    rate = RATE / 50 if optimizer in OPTIMIZERS[4:] else RATE
    for number in range(ROUNDS):
        paths, told = rounds.updates(slots[0] if slots else None)
        rate = rate / 2 if number == ROUNDS // 2 else rate
        change, slots = moved(optimizer, number, slots, RULES[rule](told), rate)
        rounds.master = rounds.master + change
        found = rounds.close(paths, f"{rule}+{optimizer}", rate)
        assert np.abs(found - rounds.master).max() < 1e-6 * np.abs(rounds.master).max(), number
