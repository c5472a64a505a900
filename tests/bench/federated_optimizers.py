"""The product's inner optimizers in the experiments, and the means of what they keep.

`training.optimizer` with the arithmetic of `facility.training.optimizers`; AdamW is torch's, whose second moments
travel as `federated_learner.py` has them. Averaged here are the first moments that `first_moments: mean` averages and
the second moments of what AdamW trains beside Muon (`optimizer_state: shared`), and, which the product does not offer,
Adafactor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from facility.exchange.messages.optimizers import OPTIMIZERS
from facility.exchange.messages.settings import TrainingSettings
from facility.training.optimizers.protocol import optimizer_of
from facility.training.shards import shard_of

if TYPE_CHECKING:
    from tests.bench.federated_learner import Learner, Local

SECOND = {"muon": ("exp_avg_sq",), "adafactor": ("row_var", "col_var", "variance")}
"""Kinds of state that are means of squared gradients."""


def settings_of(local: Local) -> TrainingSettings:
    """The product's settings of an experiment's training."""
    return TrainingSettings(
        optimizer=local.optimizer,
        optimizer_parameters=dict(local.optimizer_parameters),
        learning_rate=local.learning_rate,
        weight_decay=local.weight_decay,
        beta1=local.betas[0],
        beta2=local.betas[1],
    )


def named(local: Local, model: nn.Module) -> Any:
    """The optimizer that `local` names over all that is trained of a model."""
    parts = [shard_of(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return optimizer_of(parts, settings_of(local))


def averaged_kinds(local: Local) -> tuple[str, ...]:
    """Kinds of state that facilities average between rounds."""
    second = SECOND[local.optimizer] if local.optimizer_state == "shared" else ()
    return second + (OPTIMIZERS.get(local.optimizer).first_moments if local.first_moments == "mean" else ())


def decay_of(kind: str, local: Local) -> float:
    """How much a step keeps of a running mean that begins at zero; 0: it is not biased, as Adafactor's are not."""
    if kind == "momentum_buffer":
        return float(OPTIMIZERS.get(local.optimizer).values(local.optimizer_parameters)["momentum"])
    return {"exp_avg": local.betas[0], "exp_avg_sq": local.betas[1]}.get(kind, 0.0)


@torch.no_grad()
def share_state(learners: Sequence[Learner], weights: Sequence[float], takers: Sequence[Learner]) -> None:
    """Give `takers` the weighted mean of the learners' state, each kind corrected for its bias; whoever has not trained
    yet begins with its own."""
    local, total = learners[0].local, sum(weights)
    for number, _ in enumerate(learners[0].parameters):
        for kind in averaged_kinds(local):
            states = [learner.optimizer.state[learner.parameters[number]] for learner in learners]
            if kind not in states[0]:
                continue
            mean, decay = torch.zeros_like(states[0][kind]), decay_of(kind, local)
            for learner, state, weight in zip(learners, states, weights, strict=True):
                mean.add_(state[kind], alpha=weight / total / (1 - decay**learner.adam_steps))
            if kind == "exp_avg_sq" and mean.ndim > 1 and local.form == "factors":
                mean = mean.mean(1, keepdim=True) * mean.mean(0, keepdim=True) / mean.mean()
            for learner in takers:
                if learner.adam_steps:
                    own = learner.optimizer.state[learner.parameters[number]]
                    own[kind].copy_(mean * (1 - decay**learner.adam_steps))


@torch.no_grad()
def begin_momentum(learners: Sequence[Learner], before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
    """Let the momentum of matrices under Muon begin a round as `first_moments: step` or `zero` says."""
    for learner in learners:
        for parameter, old, new in zip(learner.parameters, before, after, strict=True):
            own = learner.optimizer.state[parameter].get("momentum_buffer")
            if own is None:
                continue
            if learner.local.first_moments == "zero":
                own.zero_()
            else:
                way = (old - new).to(own.device)
                own.copy_(way * (own.norm() / way.norm().clamp_min(1e-30)))
