"""Federated and pooled training in one process, for experiments: trainer's and coordinator's arithmetic, no workflow.

What travels is rounded to bfloat16 as in the real rounds; the coordinator keeps a float32 master and applies the rules
of `coordinator.aggregation`; a facility's AdamW moments stay with it; its learning-rate schedule spans the federation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor, nn

from coordinator.aggregation.settings import AggregationSettings
from facility.exchange.checkpoints.second_moments import Factors, mean_of
from tests.bench.federated_codecs import DeltaCodec
from tests.reproductions.server_in_memory import Server


@dataclass(frozen=True, kw_only=True)
class Text:
    """One domain's blocks of token ids, (blocks, block_tokens)."""

    train: numpy.ndarray
    validation: numpy.ndarray


@dataclass(frozen=True, kw_only=True)
class Local:
    """Settings of training at a facility."""

    batch: int = 16
    """Blocks per step."""
    learning_rate: float = 1e-3
    """Peak."""
    minimum_ratio: float = 0.1
    """Learning rate at the end over the peak."""
    warmup_steps: int = 20
    """Once for the federation."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    proximal: float = 0.0
    """FedProx's mu; 0 is off."""
    keep_optimizer: bool = True
    optimizer_state: str = "personal"
    """`shared`: second moments are averaged between rounds, as row and column means; first moments stay personal."""


def batches(blocks: numpy.ndarray, size: int, seed: int) -> Iterator[Tensor]:
    """Batches without end: a new permutation every pass, a pass continuing across rounds."""
    rng = numpy.random.default_rng(seed)
    held = numpy.empty(0, dtype=numpy.int64)
    while True:
        while len(held) < size:
            held = numpy.concatenate([held, rng.permutation(len(blocks))])
        yield torch.from_numpy(numpy.asarray(blocks[held[:size]], dtype=numpy.int64))
        held = held[size:]


class Learner:
    """One model with its AdamW, its data and its place in the schedule."""

    def __init__(self, model: nn.Module, loader: Iterator[Tensor], local: Local, total_steps: int) -> None:
        self.model, self.loader, self.local, self.total = copy.deepcopy(model), loader, local, total_steps
        self.step_number = 0
        self.adam_steps = 0
        """Steps that AdamW's moments have seen."""
        self.parameters = list(self.model.parameters())
        self._fresh()

    def _fresh(self) -> None:
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=0.0, betas=self.local.betas, weight_decay=self.local.weight_decay, fused=True
        )

    def begin_moments(self, steps: int) -> None:
        """Moments of zero, of an optimizer that has made so many steps."""
        self.adam_steps = steps
        for parameter in self.parameters:
            state = self.optimizer.state[parameter]
            state["step"] = torch.tensor(float(steps))
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine to `minimum_ratio` of the peak."""
        warm = self.local.warmup_steps
        if self.step_number < warm:
            return self.local.learning_rate * (self.step_number + 1) / warm
        share = (self.step_number - warm) / max(1, self.total - warm)
        low = self.local.minimum_ratio
        return self.local.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))

    def train(self, steps: int) -> float:
        """Take steps; returns the mean training loss."""
        if not self.local.keep_optimizer:
            self._fresh()
            self.adam_steps = 0
        anchor = [p.detach().clone() for p in self.parameters] if self.local.proximal else []
        total = 0.0
        for _ in range(steps):
            ids = next(self.loader)
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            if anchor:
                for parameter, origin in zip(self.parameters, anchor, strict=True):
                    assert parameter.grad is not None
                    parameter.grad.add_(parameter.detach() - origin, alpha=self.local.proximal)
            if self.local.clip_norm:
                nn.utils.clip_grad_norm_(self.parameters, self.local.clip_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step_number += 1
            self.adam_steps += 1
            total += float(loss.detach())
        return total / steps

    def load(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.copy_(value)


@torch.no_grad()
def share_second_moments(learners: list[Learner], weights: list[float], takers: list[Learner]) -> None:
    """Give `takers` the weighted mean of the learners' second moments, as it travels: corrected for AdamW's bias."""
    sent = []
    for learner, weight in zip(learners, weights, strict=True):
        factors, scale = {}, 1 / (1 - learner.local.betas[1] ** learner.adam_steps)
        for number, parameter in enumerate(learner.parameters):
            value = learner.optimizer.state[parameter]["exp_avg_sq"] * scale
            if parameter.ndim > 1:
                factors[str(number)] = Factors(value.flatten(1).mean(1).numpy(), value.flatten(1).mean(0).numpy())
            else:
                factors[str(number)] = Factors(value.numpy().copy())
        sent.append((factors, weight))
    mean = mean_of(sent)
    seen = max(1, round(sum(learner.adam_steps for learner in learners) / len(learners)))
    for learner in takers:
        if learner.adam_steps == 0:
            learner.begin_moments(seen)
        scale = 1 - learner.local.betas[1] ** learner.adam_steps
        for number, parameter in enumerate(learner.parameters):
            rebuilt = mean[str(number)].rebuilt(0, len(parameter)) * numpy.float32(scale)
            learner.optimizer.state[parameter]["exp_avg_sq"].copy_(torch.from_numpy(rebuilt).reshape(parameter.shape))


@torch.no_grad()
def perplexity(model: nn.Module, blocks: numpy.ndarray, limit: int = 0) -> float:
    """exp of the mean loss per token over the blocks (the first `limit`, 0: all)."""
    chosen = blocks[:limit] if limit else blocks
    total = 0.0
    for start in range(0, len(chosen), 64):
        ids = torch.from_numpy(numpy.asarray(chosen[start : start + 64], dtype=numpy.int64))
        total += float(model(input_ids=ids, labels=ids, use_cache=False).loss) * len(ids)
    return math.exp(total / len(chosen))


def rounded(values: list[Tensor]) -> list[Tensor]:
    """As they travel."""
    return [value.detach().to(torch.bfloat16).float() for value in values]


UNLIKE = ("", "steps", "sizes", "absent", "noise")
"""How the first facility (for `absent`: each in turn) differs from the others; empty: it does not."""


def steps_of(unlike: str, facility: int, round: int, steps: int) -> int:
    """Local steps of a facility in a round: with `steps` the first makes a third, with `absent` each misses a third."""
    if unlike == "absent" and round % 3 == facility % 3:
        return 0
    return max(1, steps // 3) if unlike == "steps" and facility == 0 else steps


def text_of(unlike: str, facility: int, text: Text, seed: int) -> Text:
    """A facility's text: with `sizes` the first has a tenth, with `noise` a fifth of its tokens are random."""
    if facility or unlike not in ("sizes", "noise"):
        return text
    if unlike == "sizes":
        return Text(train=text.train[: len(text.train) // 10], validation=text.validation)
    rng = numpy.random.default_rng(seed)
    train = numpy.array(text.train)
    wrong = rng.random(train.shape) < 0.2
    train[wrong] = rng.integers(0, train.max() + 1, size=int(wrong.sum()))
    return Text(train=train, validation=text.validation)


@dataclass(kw_only=True)
class Curve:
    """Perplexity of the global model, per domain, after rounds."""

    rounds: list[int] = field(default_factory=list)
    perplexities: list[dict[str, float]] = field(default_factory=list)


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
    codec: DeltaCodec | None = None,
    downlink: DeltaCodec | None = None,
    evaluation_blocks: int = 0,
    unlike: str = "",
) -> Curve:
    """Rounds of local training and outer steps, weighted by tokens (without `unlike` all take the same number)."""
    learners = {}
    for number, (name, text) in enumerate(texts.items()):
        own = text_of(unlike, number, text, seed)
        total = rounds * steps_of(unlike.replace("absent", ""), number, 0, steps)
        learners[name] = Learner(model, batches(own.train, local.batch, seed * 1000 + number), local, total)
    server = Server(aggregation)
    names = [str(position) for position, _ in enumerate(model.parameters())]
    sent = rounded([p.detach() for p in model.parameters()])
    scratch = copy.deepcopy(model)
    curve = Curve()
    for number in range(1, rounds + 1):
        updates, weights = {}, {}
        for index, (who, learner) in enumerate(learners.items()):
            count = steps_of(unlike, index, number - 1, steps)
            if unlike == "absent":  # the schedule spans the federation, as in the trainer
                learner.step_number = (number - 1) * steps
            if count == 0:
                continue
            learner.load(sent if codec is None else codec.start(index, sent))
            learner.train(count)
            weights[who] = float(count)
            update = [p.detach().clone() for p in learner.parameters]
            update = codec(index, sent, update) if codec is not None else rounded(update)
            updates[who] = dict(zip(names, update, strict=True))
        if local.optimizer_state == "shared":
            there = [learners[who] for who in updates]
            share_second_moments(there, list(weights.values()), list(learners.values()))
        # What was sent is exact in bfloat16, and the base's dtype is the dtype of the next model.
        base = {name: value.to(torch.bfloat16) for name, value in zip(names, sent, strict=True)}
        following = server.step(base, updates, weights)
        if downlink is None:
            sent = [following[name].float() for name in names]
        else:
            master = [torch.from_numpy(server.master[n]).reshape(v.shape) for n, v in zip(names, sent, strict=True)]
            sent = downlink(-1, sent, master)
            for name, before, after in zip(names, master, sent, strict=True):
                server.master[name] = downlink.master(before, after).reshape(-1).numpy()
        if number in evaluate_rounds or number == rounds:
            with torch.no_grad():
                for parameter, value in zip(scratch.parameters(), sent, strict=True):
                    parameter.copy_(value)
            curve.rounds.append(number)
            limit = 0 if number == rounds else evaluation_blocks
            curve.perplexities.append({n: perplexity(scratch, t.validation, limit) for n, t in texts.items()})
    return curve


def pool(model: nn.Module, texts: dict[str, Text], *, steps: int, local: Local, seed: int) -> Curve:
    """One model over all texts with all facilities' batches in every step: the same tokens as the federation."""
    feeds = [batches(text.train, local.batch, seed * 1000 + number) for number, text in enumerate(texts.values())]

    def joined() -> Iterator[Tensor]:
        while True:
            yield torch.cat([next(loader) for loader in feeds])

    learner = Learner(model, joined(), local, steps)
    learner.train(steps)
    return Curve(rounds=[1], perplexities=[{n: perplexity(learner.model, t.validation) for n, t in texts.items()}])


def alone(model: nn.Module, texts: dict[str, Text], *, steps: int, local: Local, seed: int) -> Curve:
    """Each facility by itself with its own batches and steps; its perplexity on its own validation text."""
    final = {}
    for number, (name, text) in enumerate(texts.items()):
        learner = Learner(model, batches(text.train, local.batch, seed * 1000 + number), local, steps)
        learner.train(steps)
        final[name] = perplexity(learner.model, text.validation)
    return Curve(rounds=[1], perplexities=[final])


def untrained(model: nn.Module, texts: dict[str, Text]) -> Curve:
    """The base model as it is."""
    return Curve(rounds=[0], perplexities=[{name: perplexity(model, text.validation) for name, text in texts.items()}])
