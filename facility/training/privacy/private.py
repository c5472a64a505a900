"""Training with differential privacy on this rank: noised steps and noised validation figures, all in the ledger.

Every rank holds the whole model and its own share of the units, samples them with randomness of its own, clips their
gradients and adds its part of the noise (variances add up: with R ranks each adds 1/R of it). Only the sum over ranks
is used. The first rank has written the ledger's line before it takes part in that sum.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from facility.dataset import IMAGES
from facility.exchange.checkpoints.layouts import refusal_of_router_loss
from facility.exchange.errors import InputError
from facility.exchange.memory.records import rows_of
from facility.exchange.messages.privacy import PrivacyReport, check_layout, sampling_rate
from facility.exchange.privacy.accounting import epsilon_of
from facility.exchange.seeds import derive_seed
from facility.rounds.privacy_ledger import Entry, Kind, ReleaseLedger
from facility.training.data.inputs import RoundInputs
from facility.training.engine import Engine, StepResult
from facility.training.parallel.compute import Whole
from facility.training.privacy.budget import OutOfBudget, choose_noise
from facility.training.privacy.gradients import Gradients, RecordGradients
from facility.training.privacy.randomness import SecretRandom
from facility.training.privacy.rows import RowReader
from facility.training.privacy.units import Units, evaluated_units, units_of
from facility.training.processes.exchange import broadcast_json
from facility.training.processes.ranks import Ranks, agree_on_failure
from facility.training.request import RoundRequest

log = logging.getLogger(__name__)


class PrivateTraining:
    """What takes the place of plain steps and evaluations."""

    def __init__(self, request: RoundRequest, inputs: RoundInputs, engine: Engine, ranks: Ranks) -> None:
        settings = request.settings.differential
        assert settings is not None
        self.request, self.settings, self.engine, self.ranks = request, settings, engine, ranks
        check_layout(request.training.layout, ranks=ranks.world)
        if inputs.dataset.manifest.task == IMAGES:
            raise InputError(
                "images are not trained with differential privacy: batch normalisation lets the records of a batch see "
                "each other, and image models without it are not recognised yet; remove privacy.differential"
            )
        if request.bundle is not None:
            raise InputError("models are compared block by block, without the noise that the settings promise: refused")
        if reason := refusal_of_router_loss(inputs.config, pipeline=False, private=True):
            raise InputError(reason)
        self.bound = math.log(inputs.dataset.manifest.vocabulary_size)
        if inputs.dataset.manifest.task == "classification":
            self.bound = math.log(max(2, len(inputs.dataset.manifest.classes)))
        self.expected = request.training.batch_sequences
        trained = sum(part.tensor.numel() for part in engine.parts)
        rows = rows_of(request.training.micro_batch_sequences, trained, self.expected / ranks.world)
        assert isinstance(engine.compute, Whole)
        model = engine.compute.modules[0]
        self.readers, self.counts = {}, {}
        for split in ("train", "validation"):
            units = units_of(inputs.dataset, split, settings.unit, most=settings.blocks_per_document)
            self.counts[split] = len(units)
            self.readers[split] = RowReader(inputs.dataset, split, units, inputs.task, model, most_rows=rows)
            self._log_left_out(split, units)
        self.sampling_rate = sampling_rate(self.expected, self.counts["train"], settings)
        self.gradients = RecordGradients(
            model,
            [part.parameter for part in engine.parts],
            inputs.task,
            engine.compute.precision,
            vectorise=not inputs.task.pools,
            held=engine.trained_rank,
        )
        self.random = SecretRandom()
        self.ledger = ReleaseLedger(state=request.state)
        self.noise: dict[Kind, float] = {}
        self.draws = 0
        self.steps_left = 0
        """Steps that the chosen noise was calibrated for: no more are taken, whatever asks for them."""

    def _log_left_out(self, split: str, units: Units) -> None:
        if units.left_out:
            log.info(
                "%s: %d pieces of documents of more than %d blocks are left out",
                split,
                units.left_out,
                self.settings.blocks_per_document,
            )

    @contextmanager
    def budget(self, done: int, *, resumed: bool) -> Iterator[None]:
        """Hold the ledger and choose the noise, `done` steps into the round. Raises `OutOfBudget`.

        `resumed`: the received model was evaluated by an earlier attempt.
        """
        try:
            chosen: dict[Kind, float] = {}
            with agree_on_failure(self.ranks):
                if self.ranks.first:
                    self.ledger.open()
                    self.ledger.check_unit(self.settings.unit)
                    chosen = self._choose(done, resumed=resumed)
            self.steps_left = self.request.training.steps - done
            self.noise = broadcast_json(chosen, self.ranks.group) if self.ranks.world > 1 else chosen
            self._log_noise()
            yield
        finally:
            self.ledger.close()

    def _log_noise(self) -> None:
        if "training" in self.noise:
            log.info(
                "differential privacy of each %s: epsilon %g at delta %g, noise multiplier %.4f, sampling rate %.4g",
                self.settings.unit,
                self.settings.epsilon,
                self.settings.delta,
                self.noise["training"],
                self.sampling_rate,
            )

    def _choose(self, done: int, *, resumed: bool) -> dict[Kind, float]:
        rounds, steps = self.request.settings.rounds, self.request.training.steps
        rounds_left = rounds - self.request.round
        chosen: dict[Kind, float] = {}
        if rounds_left:
            chosen["training"] = choose_noise(
                self.settings,
                self.ledger.releases("training"),
                planned=rounds * steps,
                left=rounds_left * steps - done,
                sampling_rate=self.sampling_rate,
                what="steps",
            )
        chosen["validation"] = choose_noise(
            self.settings,
            self.ledger.releases("validation"),
            planned=2 * rounds + 1,
            left=2 * rounds_left + 1 - resumed,
            sampling_rate=1.0,
            what="validation figures",
        )
        return chosen

    def step(self, rate: Callable[[], float]) -> StepResult:
        """One noised step on a fresh Poisson sample; its loss is not reported."""
        if self.steps_left <= 0:
            raise OutOfBudget("the noise of this round was calibrated for the steps that were taken: no further one is")
        self.steps_left -= 1
        mine = self._sample()
        # Dropout draws by a record's place in its pass, which the records before it decide: from the public seed of the
        # round, one less would change the gradients of others, by more than the clip and as anybody can compute.
        torch.manual_seed(self.random.seed())
        with self.engine.clock("backward"):
            sums = self.gradients.clipped_sum(self.readers["train"].read(mine, self._seed()), self.settings.clip)
        noise = self.noise["training"]
        self._record("training", noise, self.sampling_rate)
        add_noise(sums, self.random, self._deviation(noise * self.settings.clip))
        self._add_up(sums)
        for one in sums:
            one.div_(self.expected)
        return dataclasses.replace(self.engine.step_with(sums, rate), loss=math.nan)

    def evaluate(self) -> float:
        """Mean loss of the validation units, each at most that of a guess at random, with noise; nats."""
        reader, count = self.readers["validation"], self.evaluated
        mine = evaluated_units(self.counts["validation"], count)[self.ranks.rank :: self.ranks.world]
        total = torch.zeros(1, dtype=torch.float64)
        with self.engine.clock.stopped():
            for rows in reader.read(mine, derive_seed(self.request.settings.seed, "validation")):
                losses = self.gradients.losses(rows)
                total += losses.nan_to_num(self.bound, self.bound, 0.0).clamp(0.0, self.bound).sum()
        noise = self.noise["validation"]
        self._record("validation", noise, 1.0)
        self.random.add_normal(total, self._deviation(noise * self.bound))
        self._add_up([total])
        return min(self.bound, max(0.0, total.item() / count))

    @property
    def evaluated(self) -> int:
        """Units of the validation split that count."""
        most = self.request.training.evaluation_sequences
        return len(evaluated_units(self.counts["validation"], most))

    def report(self) -> PrivacyReport:
        """The budget so far; on the first rank, which holds the ledger."""
        settings, trained = self.settings, self.ledger.releases("training")
        return PrivacyReport(
            epsilon=settings.epsilon,
            delta=settings.delta,
            unit=settings.unit,
            clip=settings.clip,
            spent=epsilon_of(trained, settings.delta),
            spent_on_validation=epsilon_of(self.ledger.releases("validation"), settings.delta),
            noise_multiplier=trained[-1].noise_multiplier if trained else 0.0,
            sampling_rate=self.sampling_rate,
            steps=self.ledger.count("training"),
            validation_deviation=self.noise["validation"] * self.bound / self.evaluated,
        )

    def details(self) -> dict[str, Any]:
        """What was spent, for the report's details; {} on other ranks than the first."""
        return dataclasses.asdict(self.report()) if self.ranks.first else {}

    def _sample(self) -> list[int]:
        """This rank's units of the step: every rank-th one is its own, each drawn with the sampling rate."""
        own = range(self.ranks.rank, self.counts["train"], self.ranks.world)
        return [own[i] for i in self.random.chosen(len(own), self.sampling_rate)]

    def _seed(self) -> int:
        """For tasks that draw: another one for every sample."""
        self.draws += 1
        settings = self.request.settings
        return derive_seed(settings.seed, "draw", settings.facility, self.request.round, self.draws)

    def _record(self, kind: Kind, noise: float, rate: float) -> None:
        if self.ranks.first:
            self.ledger.record(
                Entry(
                    kind=kind,
                    round=self.request.round,
                    unit=self.settings.unit,
                    noise_multiplier=noise,
                    sampling_rate=rate,
                )
            )

    def _deviation(self, whole: float) -> float:
        """Standard deviation of this rank's part of noise whose sum over the ranks has the deviation `whole`."""
        return whole / math.sqrt(self.ranks.world)

    def _add_up(self, tensors: list[torch.Tensor]) -> None:
        if self.ranks.world > 1:
            with self.engine.clock("communication"):
                for one in tensors:
                    dist.all_reduce(one, group=self.ranks.group)


def add_noise(sums: Gradients, random: SecretRandom, deviation: float) -> None:
    """Add independent normal noise to every value of a sum, in place."""
    for one in sums:
        random.add_normal(one, deviation)


def private_training(
    request: RoundRequest, inputs: RoundInputs, engine: Engine, ranks: Ranks
) -> PrivateTraining | None:
    """None where the settings do not ask for differential privacy. One rank's refusal is every rank's."""
    if request.settings.differential is None:
        return None
    with agree_on_failure(ranks):
        return PrivateTraining(request, inputs, engine, ranks)
