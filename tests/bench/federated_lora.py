"""Low-rank adapters in the experiments: layers that have one, and the mean of what their factors stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from coordinator.aggregation.lora import mean_of_products
from coordinator.aggregation.settings import AggregationSettings
from facility.exchange.checkpoints.floats import Array

ALPHA = 16.0


class Adapted(nn.Module):
    """A frozen linear layer plus alpha / rank * B A; of the components the first `trained` are trained."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer, self.scale, self.trained = layer, ALPHA / rank, rank
        self.a = nn.Parameter(torch.empty(rank, layer.in_features))
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=5**0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        some = self.trained
        a = torch.cat([self.a[:some], self.a[some:].detach()])
        b = torch.cat([self.b[:, :some], self.b[:, some:].detach()], dim=1)
        return self.layer(inputs) + (inputs @ a.T) @ b.T * self.scale


def adapt(model: nn.Module, rank: int, seed: int, *, freeze_a: bool = False) -> nn.Module:
    """The model with an adapter beside every linear layer of its blocks, and nothing else trained; `freeze_a`: of the
    adapters B alone (`training.lora.freeze_a`)."""
    torch.manual_seed(seed)
    model.requires_grad_(False)
    found = [
        (parent, name, layer)
        for place, parent in model.named_modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear) and ".layers." in f".{place}."
    ]
    for parent, name, layer in found:
        adapted = Adapted(layer, rank)
        adapted.a.requires_grad_(not freeze_a)
        setattr(parent, name, adapted)
    return model


def train_components(model: nn.Module, count: int) -> None:
    """Let a facility train the first `count` components of every adapter (`training.lora.trained_rank`)."""
    for module in model.modules():
        if isinstance(module, Adapted):
            module.trained = count


class ProductMean:
    """The exact mean of the products B A, factorised again at the same rank: `aggregation.lora: product`. Each update
    counts as its step from what was sent, on top of the float32 master that this was rounded from."""

    def __init__(self, settings: AggregationSettings) -> None:
        self.settings = settings
        self.master: dict[str, Array] = {}

    def step(
        self,
        base: Mapping[str, Tensor],
        updates: Mapping[str, Mapping[str, Tensor]],
        weights: Mapping[str, float],
        staleness: Mapping[str, int] | None = None,
        squares: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, Tensor]:
        """`base`: factors A and B of each layer in turn, by their number."""
        total = sum(weights.values())
        shares = [weights[who] / total for who in updates]
        names, following = list(base), {}

        def moved(name: str) -> Sequence[Array]:
            sent = base[name].float().numpy()
            start = self.master.get(name, sent)
            return [start + (update[name].float().numpy() - sent) for update in updates.values()]

        for first, second in zip(names[::2], names[1::2], strict=True):
            factors = mean_of_products(moved(first), moved(second), shares, base[first].shape[0])
            for name, value in zip((first, second), factors, strict=True):
                self.master[name] = numpy.asarray(value, numpy.float32)
                following[name] = torch.from_numpy(self.master[name]).to(base[name].dtype)
        return following
