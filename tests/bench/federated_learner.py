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

from facility.exchange.checkpoints.moments import BLOCKS, block_means, decoded, encoded, spread
from facility.exchange.checkpoints.second_moments import Factors, mean_of
from tests.bench.federated_optimizers import named


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
    optimizer: str = "adamw"
    """One of `training.optimizer`."""
    optimizer_parameters: dict[str, float] = field(default_factory=dict)
    """Its own, as `training.optimizer_parameters`."""
    keep_optimizer: bool = True
    optimizer_state: str = "personal"
    """`shared`: second moments are averaged between rounds; first moments stay personal."""
    form: str = "factors"
    """How second moments of matrices travel: one of `training.optimizer_state_form`."""
    every: int = 1
    """Rounds from one averaging of moments to the next."""
    blend: float = 1.0
    """Share of the averaged second moments in what a facility goes on from; the rest are its own."""
    first_moments: str = "off"
    """`mean`: first moments are averaged between rounds, in full; `step` (Muon): those of matrices are the way that the
    global model went, as long as the facility's own; `zero` (Muon): they are forgotten."""
    along: float = 0.0
    """Momentum of the global model that is walked within the round instead of after it (`federated_drift.py`)."""
    control: float = 0.0
    """Share of the drift that is corrected within the round (`federated_drift.py`); 0 is off."""
    as_sent: bool = False
    """The correction is the product's: of weights in bfloat16, as updates are sent, and of a mean walk in 8 bits."""


def batches(blocks: numpy.ndarray, size: int, seed: int) -> Iterator[Tensor]:
    """Batches without end: a new permutation every pass, a pass continuing across rounds."""
    rng = numpy.random.default_rng(seed)
    held = numpy.empty(0, dtype=numpy.int64)
    while True:
        while len(held) < size:
            held = numpy.concatenate([held, rng.permutation(len(blocks))])
        yield torch.from_numpy(numpy.asarray(blocks[held[:size]], dtype=numpy.int64))
        held = held[size:]


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained and travel: all, or those of adapters."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Learner:
    """One model with its AdamW, its data and its place in the schedule."""

    def __init__(self, model: nn.Module, loader: Iterator[Tensor], local: Local, total_steps: int) -> None:
        self.model, self.loader, self.local, self.total = copy.deepcopy(model), loader, local, total_steps
        self.shift: list[Tensor] = []
        """What every step adds to the parameters, times the learning rate; empty: nothing."""
        self.rates = 0.0
        """Sum of the learning rates of the last `train`."""
        self.step_number = 0
        self.adam_steps = 0
        """Steps that AdamW's moments have seen."""
        self.parameters = trained(self.model)
        self.device = self.parameters[0].device
        self._fresh()

    def _fresh(self) -> None:
        if self.local.optimizer != "adamw":
            self.optimizer = named(self.local, self.model)
            return
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=0.0, betas=self.local.betas, weight_decay=self.local.weight_decay, fused=True
        )

    def begin_moments(self, steps: int) -> None:
        """Moments of zero, of an optimizer that has made so many steps."""
        self.adam_steps = steps
        for parameter in self.parameters:
            state = self.optimizer.state[parameter]
            state["step"] = torch.tensor(float(steps), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine to `minimum_ratio` of the peak."""
        warm = self.local.warmup_steps
        if self.step_number < warm:
            return self.local.learning_rate * (self.step_number + 1) / warm
        share = (self.step_number - warm) / max(1, self.total - warm)
        low = self.local.minimum_ratio
        return self.local.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, share))))

    def train(self, steps: int, span: int | None = None) -> float:
        """Take steps, which pass over `span` steps of the schedule (None: as many); returns the mean training loss."""
        if not self.local.keep_optimizer:
            self._fresh()
            self.adam_steps = 0
        anchor = [p.detach().clone() for p in self.parameters] if self.local.proximal else []
        losses = torch.empty(steps, dtype=torch.float64, device=self.device)
        self.rates, began = 0.0, self.step_number
        span = steps if span is None else span
        for made in range(steps):
            self.step_number = began + made * span // steps
            ids = next(self.loader).to(self.device)
            loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            if anchor:
                for parameter, origin in zip(self.parameters, anchor, strict=True):
                    assert parameter.grad is not None
                    parameter.grad.add_(parameter.detach() - origin, alpha=self.local.proximal)
            if self.local.clip_norm:
                nn.utils.clip_grad_norm_(self.parameters, self.local.clip_norm)
            rate = self.learning_rate()
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
            self.optimizer.zero_grad()
            self._move(rate)
            self.adam_steps += 1
            losses[made] = loss.detach()
        self.step_number = began + span
        return math.fsum(losses.tolist()) / steps

    @torch.no_grad()
    def _move(self, rate: float) -> None:
        """Add the shift of this step."""
        self.rates += rate
        for parameter, value in zip(self.parameters, self.shift, strict=bool(self.shift)):
            parameter.add_(value, alpha=rate)

    def load(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, values, strict=True):
                parameter.copy_(value)


@dataclass(frozen=True, kw_only=True)
class SecondMoments:
    """The mean of some facilities' second moments as it travels."""

    mean: dict[str, Factors]
    """By the position of the parameter, corrected for AdamW's bias."""
    steps: int
    """That those facilities' moments had seen, their mean."""


def by_value(value: numpy.ndarray, form: str) -> numpy.ndarray:
    """A matrix's second moments as they are read from what is sent, one a value or a block."""
    return decoded(form, encoded(form, block_means(value) if form == BLOCKS else value))


def whole(mean: numpy.ndarray, form: str, width: int) -> numpy.ndarray:
    """What is read from the mean that is sent, one for each value."""
    received = decoded(form, encoded(form, mean))
    return spread(received, width) if form == BLOCKS else received


@torch.no_grad()
def mean_second_moments(learners: list[Learner], weights: list[float]) -> SecondMoments:
    """The weighted mean of the learners' second moments."""
    sent = []
    for learner, weight in zip(learners, weights, strict=True):
        factors, scale = {}, 1 / (1 - learner.local.betas[1] ** learner.adam_steps)
        for number, parameter in enumerate(learner.parameters):
            value = learner.optimizer.state[parameter]["exp_avg_sq"].cpu() * scale
            if parameter.ndim > 1 and learner.local.form != "factors":
                factors[str(number)] = Factors(by_value(value.flatten(1).numpy(), learner.local.form).ravel())
            elif parameter.ndim > 1:
                factors[str(number)] = Factors(value.flatten(1).mean(1).numpy(), value.flatten(1).mean(0).numpy())
            else:
                factors[str(number)] = Factors(value.numpy().copy())
        sent.append((factors, weight))
    seen = max(1, round(sum(learner.adam_steps for learner in learners) / len(learners)))
    return SecondMoments(mean=mean_of(sent), steps=seen)


@torch.no_grad()
def take_second_moments(learner: Learner, shared: SecondMoments) -> None:
    """Go on from the second moments that came with the model."""
    if learner.adam_steps == 0:
        learner.begin_moments(shared.steps)
    scale = 1 - learner.local.betas[1] ** learner.adam_steps
    for number, parameter in enumerate(learner.parameters):
        mean = shared.mean[str(number)]
        if parameter.ndim > 1 and learner.local.form != "factors":
            width = parameter[0].numel()
            rebuilt = whole(mean.rows.reshape(len(parameter), -1), learner.local.form, width) * numpy.float32(scale)
        else:
            rebuilt = mean.rebuilt(0, len(parameter)) * numpy.float32(scale)
        own = learner.optimizer.state[parameter]["exp_avg_sq"]
        own.lerp_(torch.from_numpy(rebuilt).reshape(parameter.shape).to(own.device), learner.local.blend)


@torch.no_grad()
def row_squares(learner: Learner) -> dict[str, numpy.ndarray]:
    """Row means of AdamW's second moments by the parameter's name, a vector's values; of Muon, what AdamW trains beside
    it."""
    found = {}
    for name, parameter in learner.model.named_parameters():
        value = learner.optimizer.state.get(parameter, {}).get("exp_avg_sq")
        if value is not None:
            found[name] = value.flatten(1).mean(1).cpu().numpy() if value.ndim > 1 else value.cpu().numpy().copy()
    return found


def of_the_round(
    before: dict[str, numpy.ndarray], after: dict[str, numpy.ndarray], beta2: float, steps: int
) -> dict[str, numpy.ndarray]:
    """Mean squares of the gradients of so many steps, from the second moments before and after them, by row."""
    kept = beta2**steps
    return {
        name: numpy.maximum(0, (value - kept * before.get(name, 0.0)) / (1 - kept)) for name, value in after.items()
    }


@torch.no_grad()
def share_first_moments(learners: list[Learner], weights: list[float], takers: list[Learner]) -> None:
    """Give `takers` the weighted mean of the learners' first moments, in full, corrected for AdamW's bias."""
    total = sum(weights)
    for number, _ in enumerate(learners[0].parameters):
        mean = torch.zeros_like(learners[0].parameters[number])
        for learner, weight in zip(learners, weights, strict=True):
            value = learner.optimizer.state[learner.parameters[number]]["exp_avg"]
            mean.add_(value, alpha=weight / total / (1 - learner.local.betas[0] ** learner.adam_steps))
        for learner in takers:
            if learner.adam_steps:
                state = learner.optimizer.state[learner.parameters[number]]
                state["exp_avg"].copy_(mean * (1 - learner.local.betas[0] ** learner.adam_steps))


@torch.no_grad()
def perplexity(model: nn.Module, blocks: numpy.ndarray, limit: int = 0) -> float:
    """exp of the mean loss per token over the blocks (the first `limit`, 0: all)."""
    chosen = blocks[:limit] if limit else blocks
    total, device = 0.0, next(model.parameters()).device
    for start in range(0, len(chosen), 64):
        ids = torch.from_numpy(numpy.asarray(chosen[start : start + 64], dtype=numpy.int64)).to(device)
        total += float(model(input_ids=ids, labels=ids, use_cache=False).loss) * len(ids)
    return math.exp(total / len(chosen))


def rounded(values: list[Tensor]) -> list[Tensor]:
    """As they travel, at the server."""
    return [value.detach().cpu().to(torch.bfloat16).float() for value in values]


@dataclass(kw_only=True)
class Curve:
    """Perplexity of the global model, per domain, after rounds."""

    rounds: list[int] = field(default_factory=list)
    perplexities: list[dict[str, float]] = field(default_factory=list)
    last: dict[str, dict[str, float]] = field(default_factory=dict)
    """The same of the mean of so many models of the last rounds."""
