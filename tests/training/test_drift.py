"""`drift_correction`: the product takes the steps of the benchmark's plain loop, in every layout and after a pause."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.aggregation.settings import AggregationSettings
from facility.dataset import open_dataset
from facility.exchange.checkpoints.checkpoint import Checkpoint, open_checkpoint
from facility.exchange.checkpoints.mean_walk import FOLDER, byte_values, has_mean_walk, open_mean_walk
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.drift import DriftReport, drift_of
from facility.exchange.messages.manifest import Manifest, read_manifest, write_manifest
from facility.exchange.messages.outcome import Outcome
from facility.exchange.messages.report import read_report
from facility.exchange.messages.settings import TrainingSettings
from facility.training.data.order import SampleOrder
from facility.training.schedule import learning_rate
from tests.aggregation.make import aggregate
from tests.bench.federated_drift import Drift
from tests.bench.federated_learner import Local
from tests.pico import save_pico
from tests.training.federation import EPSILON, largest_difference, write_dataset
from tests.training.layouts import FOUR, TWO, arguments, rounds_in

WEIGHTS = {"north": 0.25, "south": 0.75}
ON = {"drift_correction": True, "rounds": 4, "learning_rate": 1e-2}


class Federated:
    """Rounds of two facilities with unlike data, by the trainer and the coordinator's `aggregate`."""

    def __init__(self, root: Path, **training: Any) -> None:
        self.root, self.training = root, ON | training
        self.models = [save_pico(root / "model-0")]
        write_manifest(self.models[0], Manifest(kind="model", federation="pico", round=0))
        self.datasets = {who: write_dataset(root / who / "data", seed=n) for n, who in enumerate(WEIGHTS)}

    def arguments(self, who: str, *, directory: str = "", state: str = "state", **changes: Any) -> list[str]:
        number = len(self.models) - 1
        place = self.root / who / (directory or f"round-{number}")
        words = arguments(place, self.models[-1], self.datasets[who], number, facility=who, **self.training | changes)
        words[words.index("--state") + 1] = str(self.root / who / state)
        return words

    def round(self, who: tuple[str, ...] = tuple(WEIGHTS), **changes: Any) -> None:
        """Train at the facilities `who`, and make the next model."""
        rounds_in([(one, self.arguments(one, **changes)) for one in who])
        self.aggregate(who)

    def aggregate(self, who: tuple[str, ...] = tuple(WEIGHTS)) -> None:
        """Make the next model of what the facilities `who` have trained."""
        number = len(self.models) - 1
        state = self.root / f"server-{number}"
        self.record = aggregate(
            base=self.models[-1],
            updates={one: self.root / one / f"round-{number}" / "out" for one in who},
            out=self.root / f"model-{number + 1}",
            settings=AggregationSettings(rule="mean", weights=dict(WEIGHTS)),
            state_in=state if number else None,
            state_out=self.root / f"server-{number + 1}",
        )
        self.models.append(self.root / f"model-{number + 1}")

    def told(self, who: str, number: int) -> DriftReport:
        found = drift_of(read_report(self.root / who / f"round-{number}" / "out"))
        assert found is not None
        return found

    def walk(self, who: str, number: int) -> dict[str, torch.Tensor]:
        checkpoint = open_checkpoint(self.root / who / "state" / f"round-{number}")
        return {name[5:]: checkpoint.read(name) for name in checkpoint.tensors if name.startswith("walk.")}

    def mean(self, number: int) -> dict[str, torch.Tensor]:
        """The exact one, after round `number`."""
        return read(open_checkpoint(self.root / f"server-{number + 1}" / FOLDER))


def read(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: checkpoint.read(name) for name in checkpoint.tensors}


def as_received(sent: Checkpoint, name: str) -> torch.Tensor:
    return torch.from_numpy(byte_values()[sent.read(name).view(torch.uint8).numpy()])


shared = pytest.mark.xdist_group("three rounds with a drift correction")
"""These tests share three rounds: one process runs them, and they are made once."""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Federated:
    """Three rounds of both facilities."""
    federated = Federated(tmp_path_factory.mktemp("drift"))
    for _ in range(3):
        federated.round()
    return federated


def plain_loop(federated: Federated, rounds: int) -> list[dict[str, torch.Tensor]]:
    """The models after each round, by `tests.bench.federated_drift` over a loop of AdamW steps in one process."""
    from transformers import AutoModelForCausalLM

    settings = TrainingSettings(steps=3, batch_sequences=4, learning_rate=1e-2, drift_correction=True)
    drift = Drift(Local(control=1.0))
    learners, orders, data, optimizers, models = {}, {}, {}, {}, {}
    for who in WEIGHTS:
        models[who] = AutoModelForCausalLM.from_pretrained(federated.root / "model-0", dtype=torch.float32)
        learners[who] = SimpleNamespace(
            parameters=list(models[who].parameters()), shift=[], rates=0.0, device=torch.device("cpu")
        )
        optimizers[who] = torch.optim.AdamW(
            models[who].parameters(), lr=0.0, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0
        )
        data[who] = open_dataset(federated.datasets[who]).split("train")
        orders[who] = SampleOrder(sequences=len(data[who]), seed=7, facility=who)
    names = [name for name, _ in models["north"].named_parameters()]
    start = [value.detach().clone() for value in learners["north"].parameters]
    found = []
    for number in range(rounds):
        for who, learner in learners.items():
            with torch.no_grad():
                for value, begin in zip(learner.parameters, start, strict=True):
                    value.copy_(begin)
            drift.begin(who, learner, number)
            learner.rates = 0.0
            for step in range(3 * number, 3 * number + 3):
                ids = torch.from_numpy(np.asarray(data[who][orders[who].take(4 * step, 4)], dtype=np.int64))
                models[who](input_ids=ids, labels=ids, use_cache=False).loss.backward()
                torch.nn.utils.clip_grad_norm_(learner.parameters, settings.clip_norm)
                rate = learning_rate(step, 12, settings)
                for group in optimizers[who].param_groups:
                    group["lr"] = rate
                optimizers[who].step()
                optimizers[who].zero_grad()
                learner.rates += rate
                with torch.no_grad():
                    for value, shift in zip(learner.parameters, learner.shift, strict=True):
                        value.add_(shift, alpha=rate)
        drift.end(start, learners, WEIGHTS)  # type: ignore[arg-type]
        kept, sent = federated.mean(number), open_mean_walk(federated.models[number + 1])[0]
        for name, mean in zip(names, drift.mean, strict=True):
            assert torch.allclose(kept[name], mean, atol=1e-4), name
        drift.mean = [as_received(sent, name) for name in names]  # where both round alike
        ends = [[WEIGHTS[who] * value.detach() for value in learners[who].parameters] for who in WEIGHTS]
        start = [torch.stack(pair).sum(0) for pair in zip(*ends, strict=True)]
        found.append(dict(zip(names, start, strict=True)))
    return found


@shared
def test_three_rounds_are_those_of_the_plain_loop(begun: Federated):
    for expected, model in zip(plain_loop(begun, 3), begun.models[1:], strict=True):
        own = read(open_checkpoint(model))
        for name, value in expected.items():
            assert (own[name] - value).abs().max() < 1e-6, (model.name, name)
    assert [begun.told("north", n).corrected for n in range(3)] == [False, True, True]
    assert 0.1 < begun.told("north", 1).share < 3


@shared
def test_the_mean_is_that_of_the_walks_and_corrections_cancel_in_it(begun: Federated):
    for number in range(3):
        own = {who: begun.walk(who, number) for who in WEIGHTS} if number else {}
        for name, mean in begun.mean(number).items() if own else ():
            expected = sum(WEIGHTS[who] * own[who][name] for who in WEIGHTS)
            assert torch.allclose(mean, torch.as_tensor(expected), atol=2e-5)  # 2e-8 of weights over rates of 0.02
    sent, rounds = open_mean_walk(begun.models[3])
    assert rounds == {"north": 2, "south": 2} and begun.record.details["mean_walk"]["facilities"] == rounds
    for name, mean in begun.mean(2).items():
        received = as_received(sent, name)
        assert ((received - mean).abs() <= mean.abs() / 16 + 2e-5).all()


@shared
@pytest.mark.slow
def test_every_layout_takes_the_corrected_steps_of_one_process(begun: Federated):
    cases: dict[int, list[tuple[str, list[str]]]] = {}
    for ranks, layouts in (
        (1, {"one": {}}),
        (2, {n: TWO[n] for n in ("fsdp", "1f1b")}),
        (4, {"hybrid": FOUR["hybrid"]}),
    ):
        for name, layout in layouts.items():
            shutil.copytree(begun.root / "south" / "state", begun.root / "south" / f"state-{name}")
            words = begun.arguments("south", directory=name, state=f"state-{name}", **layout)
            cases.setdefault(ranks, []).append((name, words))
    for ranks, words in cases.items():
        rounds_in(words, ranks=ranks)
    place = begun.root / "south"
    for name in ("fsdp", "1f1b", "hybrid"):
        assert largest_difference(place / "one" / "out", place / name / "out") < 1e-5, name
        one, other = (drift_of(read_report(place / which / "out")) for which in ("one", name))
        assert one is not None and other is not None and one.corrected and other.corrected
        assert other.share == pytest.approx(one.share, rel=1e-3) and other.rates == pytest.approx(one.rates)
    without = begun.arguments("south", directory="off", state="state-off", drift_correction=False)
    shutil.copytree(place / "state", place / "state-off")
    rounds_in([("off", without)])
    assert largest_difference(place / "one" / "out", place / "off" / "out") > 1e-4


@shared
def test_a_round_that_pauses_ends_bit_for_bit_like_one_that_does_not(begun: Federated):
    place = begun.root / "north"
    for name, stops in (("quiet", [0]), ("paused", [1, 2, 0])):
        shutil.copytree(place / "state", place / f"state-{name}")
        for stop in stops:
            words = begun.arguments("north", directory=name, state=f"state-{name}", limits={"stop_after": stop})
            rounds_in([(name, words)], expect=Outcome.CHECKPOINTED if stop else 0)
    assert largest_difference(place / "quiet" / "out", place / "paused" / "out") == 0
    walks = [read(open_checkpoint(place / f"state-{name}" / "round-3")) for name in ("quiet", "paused")]
    assert walks[0].keys() == walks[1].keys() and any(name.startswith("walk.") for name in walks[0])
    assert all(torch.equal(value, walks[1][name]) for name, value in walks[0].items())


@pytest.mark.slow
def test_who_was_absent_comes_back_with_its_own_walk_and_who_lost_it_begins_anew(tmp_path: Path):
    federated = Federated(tmp_path, rounds=6, steps=1)
    federated.round(("north",))
    assert not federated.told("north", 0).corrected
    federated.round()  # the south joins
    assert federated.told("north", 1).corrected and not federated.told("south", 1).corrected
    federated.round(("north",))  # the south is absent, and stays in the mean
    assert open_mean_walk(federated.models[-1])[1] == {"north": 2, "south": 1}
    federated.round()
    assert federated.told("south", 3).corrected
    expected = {who: federated.walk(who, 3) for who in WEIGHTS}
    weights = json.loads(open_checkpoint(tmp_path / "server-4" / FOLDER).metadata["weights"])
    assert weights["south"] == pytest.approx(3 * weights["north"])  # as in a round of both
    for name, mean in federated.mean(3).items():
        total = sum(weights[who] * expected[who][name] for who in WEIGHTS) / sum(weights.values())
        assert torch.allclose(mean, torch.as_tensor(total), atol=1e-4), name
    shutil.rmtree(tmp_path / "south" / "state")
    federated.round()
    assert not federated.told("south", 4).corrected and "sat out" in federated.told("south", 4).reason
    assert not has_mean_walk(federated.models[-1]) and "south" in federated.record.details["mean_walk"]["reason"]
    federated.round()
    assert not federated.told("north", 5).corrected and has_mean_walk(federated.models[-1])


@pytest.mark.slow
def test_adapters_are_corrected_from_the_third_round_on(tmp_path: Path):
    federated = Federated(tmp_path, lora={"rank": 2})
    for _ in range(3):
        federated.round()
    assert drift_of(read_report(tmp_path / "north" / "round-0" / "out")) is None  # they begin in round 0
    assert [federated.told("south", n).corrected for n in (1, 2)] == [False, True]
    sent, _ = open_mean_walk(federated.models[-1])
    assert sent.tensors.keys() == open_checkpoint(tmp_path / "north" / "round-2" / "out").tensors.keys()


def test_a_mean_that_would_carry_a_facility_off_is_not_followed_and_begins_anew(tmp_path: Path):
    """As one facility that lies can make it: a step of the others would be the mean, and not their own."""
    federated = Federated(tmp_path, steps=1)
    federated.round()
    for entry in open_mean_walk(federated.models[-1])[0].tensors.values():
        with open(entry.file, "r+b") as file:
            file.seek(entry.start)
            file.write(b"\x7e" * entry.size)  # 7 a value, the largest that there is
    sent = write_manifest(federated.models[-1], read_manifest(federated.models[-1]))
    kept = read_manifest(tmp_path / "server-1")
    write_manifest(tmp_path / "server-1", dataclasses.replace(kept, extra={"model_sha256": sent.content_sha256}))
    federated.round()
    for who in WEIGHTS:
        told = federated.told(who, 1)
        assert not told.corrected and told.share == 0 and "times as long as this facility's own walk" in told.reason
    assert not has_mean_walk(federated.models[-1]), "the mean begins anew"
    federated.round()
    assert has_mean_walk(federated.models[-1])


@pytest.mark.slow
def test_noised_steps_are_corrected_too(tmp_path: Path):
    federated = Federated(tmp_path, batch_sequences=8, steps=2)
    for _ in range(2):
        for who in WEIGHTS:
            words = federated.arguments(who)
            file = Path(words[words.index("--settings") + 1])
            raw = json.loads(file.read_text()) | {"differential": {"epsilon": 8.0, "delta": 1e-3, "unit": "block"}}
            file.write_text(json.dumps(raw))
            rounds_in([(who, words)])
        federated.aggregate()
    assert federated.told("north", 1).corrected and federated.told("north", 1).share > 0
    assert open_mean_walk(federated.models[-1])[1] == {"north": 1, "south": 1}


@pytest.mark.parametrize(
    "changes",
    [{"keep_optimizer": False}, {"sync": {"policy": "local"}}, {"lora": {"rank": 4, "trained_rank": 2}}],
)
def test_what_excludes_the_correction_is_refused(changes: dict[str, Any]):
    from facility.exchange.validation import parse_dataclass

    with pytest.raises(ConfigurationError, match="drift_correction"):
        parse_dataclass(TrainingSettings, {"drift_correction": True} | changes)
