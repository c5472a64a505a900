"""What a server may do in a round that some facilities miss (experiments): `Arm.incomplete`.

`rate`: its learning rate times the present weights over all (`coordinator.rounds.presence`). `momentum`: its momentum
times that. `both`. `zero`: who is absent counts with a step of zero, so that the momentum takes over the smaller step
as well. `last`: an absent facility counts with its last step (MIFA: Gu et al. 2021, arXiv 2106.04159), `fading`: half
as large for every round since. `corrected`: the mean of all last steps plus what the present ones differ from theirs
(FedVARP: Jhunjhunwala et al. 2022, arXiv 2207.14130).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from coordinator.aggregation.settings import AggregationSettings
from coordinator.steps.schedule import decay_factor, with_rate
from tests.reproductions.server_in_memory import Server

WAYS = ("", "rate", "momentum", "both", "zero", "last", "fading", "corrected")
FADING = 0.5


class Outer(Server):
    """The server, whose learning rate decays over the last rounds where the settings say so."""

    def __init__(self, settings: AggregationSettings, rounds: int, *, facilities: int, incomplete: str = "") -> None:
        super().__init__(settings)
        self.whole, self.rounds, self.facilities, self.incomplete = settings, rounds, facilities, incomplete
        self.last: dict[str, dict[str, Tensor]] = {}
        """Steps of the last round that each facility was in, and its weight there."""
        self.missed: dict[str, int] = {}
        self.weighed: dict[str, float] = {}

    def step(
        self,
        base: Mapping[str, Tensor],
        updates: Mapping[str, Mapping[str, Tensor]],
        weights: Mapping[str, float],
        staleness: Mapping[str, int] | None = None,
        squares: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, Tensor]:
        self.weighed |= weights
        share, to = self.whole.server_decay_share, self.whole.server_decay_to
        factor = decay_factor(self.round, self.rounds, share=share, to=to)
        present = 1.0
        if self.incomplete:
            known = sum(self.weighed.values()) * self.facilities / len(self.weighed)
            present = sum(weights.values()) / known
        # Parameters of rules are fields that no type declares.
        settings: Any = with_rate(self.whole, factor * (present if self.incomplete in ("rate", "both") else 1.0))
        if self.incomplete in ("momentum", "both"):
            settings = dataclasses.replace(settings, momentum=settings.momentum * present)
        self.settings = settings
        if self.incomplete == "zero":
            updates = {
                who: {
                    name: base[name].float() + (value.float() - base[name].float()) * present
                    for name, value in one.items()
                }
                for who, one in updates.items()
            }
        if self.incomplete in ("last", "fading", "corrected"):
            updates, weights = self._with_last(base, updates, weights)
        return super().step(base, updates, weights, staleness, squares)

    def _with_last(
        self, base: Mapping[str, Tensor], updates: Mapping[str, Mapping[str, Tensor]], weights: Mapping[str, float]
    ) -> tuple[Mapping[str, Mapping[str, Tensor]], Mapping[str, float]]:
        """Updates that stand for those of all facilities that have been in some round."""
        start = {name: value.float() for name, value in base.items()}
        steps = {who: {name: update[name].float() - start[name] for name in start} for who, update in updates.items()}
        absent = {who: step for who, step in self.last.items() if who not in steps}
        self.missed = {who: self.missed.get(who, 0) + 1 for who in absent}
        if self.incomplete == "corrected" and absent:
            found = self._corrected(steps, absent, start)
        else:
            fade = FADING if self.incomplete == "fading" else 1.0
            old = {
                who: {name: value * fade ** self.missed[who] for name, value in step.items()}
                for who, step in absent.items()
            }
            found = steps | old
        self.last |= steps
        made = {who: {name: start[name] + step[name] for name in start} for who, step in found.items()}
        return made, {who: weights.get(who, self.weighed[who]) for who in made}

    def _corrected(
        self, steps: dict[str, dict[str, Tensor]], absent: dict[str, dict[str, Tensor]], start: dict[str, Tensor]
    ) -> dict[str, dict[str, Tensor]]:
        """Each present facility's step, moved so that their mean is FedVARP's."""
        everybody = self.last | steps
        total = sum(self.weighed[who] for who in everybody)
        here = sum(self.weighed[who] for who in steps)
        moved = {}
        for name in start:
            zero = torch.zeros_like(start[name])
            old = sum((self.last.get(who, {}).get(name, zero) * self.weighed[who] for who in everybody), zero) / total
            seen = sum((self.last.get(who, {}).get(name, zero) * self.weighed[who] for who in steps), zero) / here
            moved[name] = old - seen
        return {who: {name: step[name] + moved[name] for name in start} for who, step in steps.items()}
