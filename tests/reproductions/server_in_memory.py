"""The same server in memory, on torch tensors: for simulations and tests of quality.

    server = Server(settings)
    model = server.step(model, {"alpha": tensors, "beta": tensors}, {"alpha": 1200, "beta": 345})

follows the kernel operation by operation, so a run over files gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from coordinator.aggregation.outliers import screened
from coordinator.aggregation.plan import make_plan, needs_histograms, needs_momentum
from coordinator.aggregation.rules import mean
from coordinator.aggregation.rules.contract import RoundUpdates, RowSquares
from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS, build
from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.steps import add_products
from coordinator.aggregation.streams import PIECE
from facility.exchange.checkpoints import magnitudes
from facility.exchange.masking.weights import cap_weights

if TYPE_CHECKING:
    import torch


class Server:
    """Float32 master and optimiser tensors between rounds."""

    def __init__(self, settings: AggregationSettings) -> None:
        self.settings = settings
        self.master: dict[str, Any] = {}
        self.slots: dict[str, list[Any]] = {}
        self.round = 0
        self.details: dict[str, Any] = {}
        """What the rule decided in the last round."""
        self.gram: Any = None
        """Inner products of the last round's steps, facilities in the order of their names."""

    def step(
        self,
        base: Mapping[str, torch.Tensor],
        updates: Mapping[str, Mapping[str, torch.Tensor]],
        weights: Mapping[str, float],
        staleness: Mapping[str, int] | None = None,
        squares: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, torch.Tensor]:
        """The next model, each tensor in the base's dtype. `base` is the model that the updates started from.

        `squares`: mean squared gradients by facility and tensor, by row; nothing is known of one that is missing.
        """
        import torch

        settings = self.settings
        names = sorted(updates)
        total = math.fsum(weights[name] for name in names)
        shares = [weights[name] / total for name in names]
        floats = [name for name, tensor in base.items() if tensor.is_floating_point()]

        def flat(tensor: torch.Tensor) -> Any:
            return tensor.detach().to("cpu", torch.float32).reshape(-1).numpy()

        starts = {name: flat(base[name]) for name in floats}
        steps = {name: np.stack([flat(updates[who][name]) - starts[name] for who in names]) for name in floats}
        self.gram = np.zeros((len(names), len(names)))
        by_tensor = {name: np.zeros((len(names), len(names))) for name in floats}
        for name in floats:
            for piece in _pieces(steps[name].shape[1]):
                add_products(by_tensor[name], steps[name][:, piece])
                add_products(self.gram, steps[name][:, piece])
        if len(names) >= settings.screen.minimum_updates:
            shares = cap_weights(shares, settings.maximum_share) if max(shares) > settings.maximum_share else shares
        found = screened(names, self.gram, settings.screen)
        kept = [i for i, name in enumerate(names) if name not in found.quarantined]
        if len(kept) < len(names):
            names = [names[i] for i in kept]
            total = math.fsum(weights[name] for name in names)
            shares = [weights[name] / total for name in names]
            if len(names) >= settings.screen.minimum_updates and max(shares) > settings.maximum_share:
                shares = cap_weights(shares, settings.maximum_share)
            steps = {name: block[kept] for name, block in steps.items()}
            self.gram = self.gram[np.ix_(kept, kept)]
            by_tensor = {name: one[np.ix_(kept, kept)] for name, one in by_tensor.items()}
        histograms = None
        if needs_histograms(settings):
            histograms = [
                np.sum([magnitudes.histogram(steps[name][k]) for name in floats], axis=0) for k in range(len(names))
            ]
        optimizer = SERVER_OPTIMIZERS.get(settings.server_optimizer)
        outer, slot_starts = build(settings.server_optimizer, self.round, settings.values_of(optimizer))
        if momentum := needs_momentum(settings):
            for name in floats:
                velocity = self.slots[name][0] if name in self.slots else np.zeros_like(starts[name])
                steps[name] = np.concatenate([steps[name], velocity[None]])
        seen = RoundUpdates(
            facilities=names,
            weights=shares,
            number=self.round,
            inner_products=self.gram,
            tensor_products=by_tensor,
            momentum_products={name: _along(block) for name, block in steps.items()} if momentum else None,
            staleness=[(staleness or {}).get(name, 0) for name in names],
            histograms=histograms,
            squared_gradients=None if squares is None else Squares([squares.get(name) for name in names], base),
        )
        plan = make_plan(settings, seen)
        self.details = plan.details | {"suspects": found.suspects}
        result = dict(base)
        for name in floats:
            master = self.master.get(name)
            master = starts[name].copy() if master is None else master
            slots = self.slots.get(name) or [np.full_like(master, start) for start in slot_starts]
            for piece in _pieces(len(master)):
                block = steps[name][:, piece]
                if (coefficients := plan.coefficients_of(name)) is not None:
                    step = mean.combine(block, coefficients)
                else:
                    assert plan.combine is not None
                    step = plan.combine(block, name, piece.start)
                master[piece], after = outer(master[piece], step, [slot[piece] for slot in slots])
                for slot, value in zip(slots, after, strict=True):
                    slot[piece] = value
            self.master[name], self.slots[name] = master, slots
            result[name] = torch.from_numpy(master.copy()).reshape(base[name].shape).to(base[name].dtype)
        self.round += 1
        return result


class Squares:
    """A rule's `SquaredGradients`, of what is in memory."""

    def __init__(self, updates: Sequence[Mapping[str, Any] | None], base: Mapping[str, torch.Tensor]) -> None:
        """`updates`: None for one of whose gradients nothing is known."""
        self._updates, self._base = updates, base

    def of(self, tensor: str) -> RowSquares | None:
        known = [one for one in self._updates if one is not None]
        if not known or not all(tensor in one for one in known):
            return None
        values = np.stack([np.zeros_like(known[0][tensor]) if one is None else one[tensor] for one in self._updates])
        return RowSquares(values, max(1, self._base[tensor].numel() // values.shape[1]))


def _pieces(count: int) -> list[slice]:
    return [slice(start, min(start + PIECE, count)) for start in range(0, count, PIECE)]


def _along(rows: Any) -> Any:
    """Inner products of the rows with the last one, summed by pieces as the kernel does."""
    total = np.zeros(len(rows))
    for piece in _pieces(rows.shape[1]):
        pairs = np.zeros((len(rows), len(rows)))
        add_products(pairs, rows[:, piece])
        total += pairs[-1]
    return total
