"""The rounds of a federation in one process: local training, what travels, the outer step, and its curve."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from coordinator.aggregation.settings import AggregationSettings
from tests.bench.federated_codecs import DeltaCodec
from tests.bench.federated_drift import Drift
from tests.bench.federated_incomplete import Outer
from tests.bench.federated_learner import (
    Curve,
    Learner,
    Local,
    Text,
    batches,
    mean_second_moments,
    of_the_round,
    perplexity,
    rounded,
    row_squares,
    share_first_moments,
    take_second_moments,
    trained,
)
from tests.bench.federated_lora import train_components
from tests.bench.federated_optimizers import begin_momentum, share_state
from tests.bench.federated_unlike import is_late, steps_of, text_of
from tests.reproductions.server_in_memory import Server

LAST = (2, 3, 5)
"""So many models of the last rounds are averaged beside the final one."""


class Uplink(Protocol):
    """What travels to the server instead of bfloat16."""

    def __call__(self, sender: int, reference: list[Tensor], values: list[Tensor]) -> list[Tensor]: ...

    def start(self, sender: int, received: list[Tensor]) -> list[Tensor]: ...


class Aggregator(Protocol):
    """What makes the next model, tensors by name."""

    settings: AggregationSettings

    def step(
        self,
        base: Mapping[str, Tensor],
        updates: Mapping[str, Mapping[str, Tensor]],
        weights: Mapping[str, float],
        staleness: Mapping[str, int] | None = None,
        squares: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, Tensor]: ...


class Federation:
    """Facilities, the server and the model that was sent last."""

    def __init__(
        self,
        model: nn.Module,
        texts: dict[str, Text],
        *,
        rounds: int,
        steps: int,
        local: Local,
        server: Aggregator,
        seed: int,
        codec: Uplink | None = None,
        unlike: str = "",
        trained_ranks: Sequence[int] = (),
    ) -> None:
        self.steps, self.local, self.server, self.codec, self.unlike = steps, local, server, codec, unlike
        self.learners = {}
        for number, (name, text) in enumerate(texts.items()):
            own = text_of(unlike, number, text, seed)
            total = rounds * steps_of("steps" if unlike == "steps" else "", number, 0, steps)
            self.learners[name] = Learner(model, batches(own.train, local.batch, seed * 1000 + number), local, total)
        for learner, count in zip(self.learners.values(), cycle(trained_ranks), strict=False):
            train_components(learner.model, count)
        self.names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self.sent = rounded([p.detach() for p in trained(model)])
        self.drift = Drift(local)
        self.pending: dict[str, list[Tensor]] = {}
        """Steps of late facilities, begun in the last round."""
        self.squares: dict[str, dict[str, Any]] = {}
        """Mean squared gradients of this round's facilities by row, where the rule looks at them."""

    def train(self, number: int) -> dict[str, list[Tensor]]:
        """What every facility of round `number` (from 1) ends with, as it arrives."""
        arrived, self.squares = {}, {}
        weighs_rows = self.server.settings.weighs_rows
        begun: dict[str, float] = {}
        for index, (who, learner) in enumerate(self.learners.items()):
            if who in self.pending:
                arrived[who] = [now + step for now, step in zip(self.sent, self.pending.pop(who), strict=True)]
            count = steps_of(self.unlike, index, number - 1, self.steps)
            if self.unlike in ("absent", "late"):  # the schedule spans the federation, as in the trainer
                learner.step_number = (number - 1) * self.steps
            if count == 0:
                continue
            learner.load(self.sent if self.codec is None else self.codec.start(index, self.sent))
            if self.drift.on:
                self.drift.begin(who, learner, number - 1)
            received = row_squares(learner) if weighs_rows else {}
            learner.train(count)
            if weighs_rows and not is_late(self.unlike, index):
                self.squares[who] = of_the_round(received, row_squares(learner), self.local.betas[1], count)
            begun[who] = float(count)
            values = [p.detach().cpu().clone() for p in learner.parameters]
            values = self.codec(index, self.sent, values) if self.codec is not None else rounded(values)
            if is_late(self.unlike, index):
                self.pending[who] = [new - old for old, new in zip(self.sent, values, strict=True)]
            else:
                arrived[who] = values
        if self.drift.on:
            self.drift.end(self.sent, self.learners, begun)
        if number % self.local.every == 0:
            self.share(begun)
        return arrived

    def share(self, begun: Mapping[str, float]) -> None:
        """Average the moments that travel, over the facilities of the round."""
        there, weights = [self.learners[who] for who in begun], list(begun.values())
        if self.local.optimizer != "adamw":
            share_state(there, weights, list(self.learners.values()))
            return
        if self.local.optimizer_state == "shared":
            shared = mean_second_moments(there, weights)
            for learner in self.learners.values():
                take_second_moments(learner, shared)
        if self.local.first_moments == "mean":
            share_first_moments(there, weights, list(self.learners.values()))

    def aggregate(self, arrived: Mapping[str, list[Tensor]], downlink: DeltaCodec | None) -> None:
        """The outer step, and what is sent next."""
        order = list(self.learners)
        late = {who: int(is_late(self.unlike, order.index(who))) for who in arrived}
        counts = {who: float(steps_of(self.unlike, order.index(who), late[who], self.steps)) for who in arrived}
        if self.unlike in ("absent", "late"):
            counts = dict.fromkeys(arrived, float(self.steps))
        weights = {who: counts[who] * (1 + late[who]) ** -self.server.settings.staleness_exponent for who in arrived}
        updates = {who: dict(zip(self.names, values, strict=True)) for who, values in arrived.items()}
        # What was sent is exact in bfloat16, and the base's dtype is the dtype of the next model.
        base = {name: value.to(torch.bfloat16) for name, value in zip(self.names, self.sent, strict=True)}
        before = self.sent
        following = self.server.step(base, updates, weights, late if any(late.values()) else None, self.squares or None)
        if downlink is None:
            self.sent = [following[name].float() for name in self.names]
        else:
            assert isinstance(self.server, Server)
            own = self.server.master
            master = [torch.from_numpy(own[n]).reshape(v.shape) for n, v in zip(self.names, self.sent, strict=True)]
            self.sent = downlink(-1, self.sent, master)
            for name, old, new in zip(self.names, master, self.sent, strict=True):
                own[name] = downlink.master(old, new).reshape(-1).numpy()
        if self.local.first_moments in ("step", "zero"):
            begin_momentum(list(self.learners.values()), before, self.sent)
        if self.drift.on:
            self.drift.moved(before, self.sent, next(iter(self.learners.values())).rates)


def federate(
    model: nn.Module,
    texts: dict[str, Text],
    *,
    rounds: int,
    steps: int,
    local: Local,
    aggregation: AggregationSettings,
    seed: int,
    evaluate_rounds: set[int],
    codec: Uplink | None = None,
    downlink: DeltaCodec | None = None,
    evaluation_blocks: int = 0,
    unlike: str = "",
    server: Aggregator | None = None,
    trained_ranks: Sequence[int] = (),
    incomplete: str = "",
) -> Curve:
    """Rounds of local training and outer steps, weighted by tokens (without `unlike` all take the same number).

    `trained_ranks`: components of its adapters that each facility trains, in turn; none: all. `incomplete`: what the
    server does in rounds that facilities miss (`federated_incomplete.py`).
    """
    server = server or Outer(aggregation, rounds, facilities=len(texts), incomplete=incomplete)
    federation = Federation(
        model,
        texts,
        rounds=rounds,
        steps=steps,
        local=local,
        server=server,
        seed=seed,
        codec=codec,
        unlike=unlike,
        trained_ranks=trained_ranks,
    )
    scratch, curve = copy.deepcopy(model), Curve()
    recent: deque[list[Tensor]] = deque(maxlen=max(LAST))

    def measured(values: list[Tensor], limit: int = 0) -> dict[str, float]:
        with torch.no_grad():
            for parameter, value in zip(trained(scratch), values, strict=True):
                parameter.copy_(value)
        return {name: perplexity(scratch, text.validation, limit) for name, text in texts.items()}

    for number in range(1, rounds + 1):
        federation.aggregate(federation.train(number), downlink)
        recent.append(federation.sent)
        if number in evaluate_rounds or number == rounds:
            curve.rounds.append(number)
            curve.perplexities.append(measured(federation.sent, 0 if number == rounds else evaluation_blocks))
    for count in LAST:
        if count < rounds:
            kept = list(recent)[-count:]
            mean = rounded([torch.stack(values).mean(0) for values in zip(*kept, strict=True)])
            curve.last[str(count)] = measured(mean)
    return curve
