"""Law: rounds whose messages are encoded both ways are those of a plain loop, with what was left out kept and sent."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.aggregation.settings import AggregationSettings
from coordinator.archive.rounds import Archive
from coordinator.config.settings import CoordinatorSettings, SendingSettings
from coordinator.steps.aggregate import close_round
from coordinator.steps.arrived import CollectedRound, sort_out
from coordinator.steps.start import start
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.delta_codecs import fading_of, trained_from
from facility.exchange.messages import report
from facility.exchange.messages.manifest import read_manifest, run_of, with_run, write_manifest
from facility.exchange.messages.settings import TrainingSettings
from facility.rounds.models import note_kept_model
from facility.rounds.smaller import make_smaller, residual_path
from tests.aggregation import make
from tests.aggregation.test_many_rounds import capped

NAMES = ("alpha", "beta", "gamma", "delta")
SHAPES: dict[str, tuple[int, ...]] = {"embed.weight": (60, 71), "a.weight": (47, 113), "b.bias": (5,), "one": ()}
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())
ROUNDS, MOMENTUM, DECAY, DECAY_TO = 8, 0.7, 0.4, 0.65


def flat(tensors: make.Tensors) -> np.ndarray:
    """In float64; a residual holds only what moved."""
    found = {name: tensors.get(name, torch.zeros(shape)) for name, shape in SHAPES.items()}
    return np.concatenate([found[name].double().numpy().reshape(-1) for name in SHAPES])


def tensors_of(values: np.ndarray) -> make.Tensors:
    pieces = np.split(values.astype(np.float32), np.cumsum([int(np.prod(s)) for s in SHAPES.values()])[:-1])
    return {
        name: torch.from_numpy(one.reshape(shape)) for (name, shape), one in zip(SHAPES.items(), pieces, strict=True)
    }


class Encoded:
    """Four facilities that keep what they have not sent, and the archive."""

    def __init__(self, root: Path, upwards: str, downwards: str, dtype: torch.dtype) -> None:
        self.root, self.dtype = root, dtype
        exported = "float32" if upwards != "full" else str(dtype).removeprefix("torch.")
        self.training = TrainingSettings(encoding=upwards, export_dtype=exported, unsent_share=0.25)  # type: ignore[arg-type]
        rule = AggregationSettings(
            rule="nesterov", momentum=MOMENTUM, server_decay_share=DECAY, incomplete_rate="share"
        )
        sending = SendingSettings(encoding=downwards)
        self.settings = CoordinatorSettings(
            federation="f", rounds=ROUNDS, facilities=list(NAMES), aggregation=rule, sending=sending, retries=0
        )
        self.archive = Archive(root / "archive")
        initial = make.checkpoint(root / "initial", make.random_tensors(0, SHAPES, dtype, 0.5))
        self.model = start(self.archive, initial, self.settings)[0]
        self.left = {name: np.zeros(SIZE) for name in NAMES}
        self.last: dict[str, int] = {}

    def train(self, name: str, number: int, own: np.ndarray, tokens: int, loss: float) -> tuple[Path, np.ndarray]:
        """A facility's message, and the step that it stands for: what was walked and kept, without what is kept now."""
        base, encoding = flat(make.read_all(self.model)), self.training.encoding
        taken = trained_from(encoding, self.training.unsent_share)
        trained = tensors_of(base + taken * self.left[name] + own)
        if encoding == "full":
            trained = {key: value.to(self.dtype) for key, value in trained.items()}
        path = make.update(self.root / f"{name}{number}", trained, base=self.model, facility=name, tokens=tokens)
        told = report.read_report(path)
        report.write(path, dataclasses.replace(told, federation="f", loss_received=loss, loss_returned=loss))
        write_manifest(path, dataclasses.replace(read_manifest(path), federation="f", files={}))
        with_run(path, run_of(read_manifest(self.model)))
        state, more = self.root / "states" / name, {"settings": self.training, "patterns": Patterns()}
        make_smaller(path, model=self.model, state=state, round=number, **more)  # type: ignore[arg-type]
        note_kept_model(path, read_manifest(self.model).content_sha256)
        step = flat(trained) - base
        if encoding != "full":
            step += max(0.0, fading_of(encoding) - taken) * self.left[name]
            self.left[name] = flat(make.read_all(residual_path(state, number)))
            step -= self.left[name]
        return path, step

    def away(self, name: str, number: int) -> Path:
        path = self.root / f"{name}{number}"
        path.mkdir()
        report.write(path, report.Failure(facility=name, round=number, reason="away", kind="late"))
        return path

    def present(self, tokens: dict[str, int]) -> float:
        """The share of the weights that are there; an absent one's is its last."""
        everyone = {name: tokens.get(name, self.last.get(name, 0)) for name in NAMES}
        shares = dict(zip(everyone, capped(np.array(list(everyone.values()), float)), strict=True))
        missing = len(NAMES) - len(tokens)
        self.last |= tokens
        return float(min(1.0, max(sum(shares[name] for name in tokens), 1 - missing / 2)))


def decay(number: int) -> float:
    falling, left = round(DECAY * ROUNDS), ROUNDS - 1 - number
    return 1.0 if left >= falling else DECAY_TO + (1 - DECAY_TO) * left / falling


@pytest.mark.parametrize(
    ("upwards", "downwards", "dtype", "links"),
    [
        ("full", "delta-int4", torch.float16, True),
        pytest.param("delta-int8", "sparse", torch.bfloat16, False, marks=pytest.mark.slow),
        ("delta-int4", "changed", torch.bfloat16, True),
        pytest.param("sparse", "full", torch.float32, True, marks=pytest.mark.slow),
        ("sparseloco", "delta-int8", torch.bfloat16, True),
    ],
)
def test_the_master_is_that_of_the_plain_loop(
    tmp_path: Path, monkeypatch, request, upwards: str, downwards: str, dtype: torch.dtype, links: bool
):
    """Facilities are absent, the loss rises once, and the rate falls at the end; with and without hard links."""
    if not links:
        request.getfixturevalue("no_hard_links")
    (tmp_path / "step").mkdir()
    monkeypatch.chdir(tmp_path / "step")
    federation, draw = Encoded(tmp_path, upwards, downwards, dtype), random.Random(upwards + downwards)
    noise, velocity = np.random.default_rng(1), np.zeros(SIZE)
    master = flat(make.read_all(federation.model))
    for number in range(ROUNDS):
        who = NAMES if number == 0 else draw.sample(NAMES, draw.choice([2, 3, 4]))
        tokens, loss = {name: draw.choice([30, 100, 300]) for name in NAMES if name in who}, 4.0 - 0.1 * number
        paths, steps = [], dict[str, Any]()
        for name in NAMES:
            if name not in who:
                paths.append(federation.away(name, number))
                continue
            own = noise.normal(0, 10 ** noise.uniform(-2.5, -2.2), SIZE)
            risen = loss + 0.5 * (number == 3)
            path, steps[name] = federation.train(name, number, own, tokens[name], risen)
            paths.append(path)
        norms = {name: float(np.linalg.norm(step)) for name, step in steps.items()}
        limit = median(norms.values()) if len(steps) > 2 else np.inf
        clipped = np.array([step * min(1.0, limit / norms[name]) for name, step in steps.items()])
        weights = np.array(list(tokens.values()), float)
        combined = (capped(weights) if len(steps) > 2 else weights / weights.sum()) @ clipped
        rate = (0.5 if 3 <= number < 6 else 1.0) * decay(number) * federation.present(tokens)
        momentum = min(MOMENTUM, number / (number + 3))
        velocity = momentum * velocity + combined
        master = master + rate * (combined + momentum * velocity)
        arrived = sort_out(paths, NAMES, number)
        close_round(
            CollectedRound(
                archive=federation.archive,
                settings=federation.settings,
                model=federation.model,
                number=number,
                arrived=arrived,
            )
        )
        federation.model = federation.archive.model_for(number + 1)
        sent = flat(make.read_all(federation.model))
        if downwards == "sparse":  # half of what facilities did not receive is forgotten
            master = master + 0.5 * (sent - master)
        found = flat(make.read_all(federation.archive.round_directory(number) / "state" / "master"))
        assert np.abs(found - master).max() < 1e-6 * np.abs(master).max(), number
