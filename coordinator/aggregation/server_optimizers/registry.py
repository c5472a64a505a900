"""The server optimisers by name, with their numbers filled in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from coordinator.aggregation.server_optimizers import fedadagrad, fedadam, fedavgm, fedyogi, nesterov, slowmo
from coordinator.config.aggregation import AggregationSettings

Outer = Callable[[Any, Any, Sequence[Any]], tuple[Any, list[Any]]]
"""(master, step, slots) -> (master, slots), on numpy arrays or torch tensors."""
SLOT_NAMES = {
    "plain": (),
    "fedavgm": ("velocity",),
    "nesterov": ("velocity",),
    "slowmo": ("slow_momentum",),
    "fedadam": ("first_moment", "second_moment"),
    "fedyogi": ("first_moment", "second_moment"),
    "fedadagrad": ("first_moment", "second_moment"),
}


def plain(master: Any, step: Any, slots: Sequence[Any], *, learning_rate: float) -> tuple[Any, list[Any]]:
    """The step times the learning rate."""
    return (master + step if learning_rate == 1 else master + learning_rate * step), []


def outer_of(settings: AggregationSettings, round: int) -> tuple[Outer, tuple[float, ...]]:
    """The settings' server optimiser in round `round`, and the first values of its slots."""
    s = settings
    common: dict[str, Any] = {"learning_rate": s.server_learning_rate}
    if s.outer == "plain":
        return partial(plain, **common), ()
    common["momentum"] = s.momentum
    if s.outer == "fedavgm":
        return partial(fedavgm.apply, **common), fedavgm.starts()
    if s.outer == "nesterov":
        if s.momentum_warmup:
            common["momentum"] = nesterov.momentum_of(round, s.momentum)
        return partial(nesterov.apply, **common), nesterov.starts()
    if s.outer == "slowmo":
        return partial(slowmo.apply, **common, local_learning_rate=s.slowmo_learning_rate), slowmo.starts()
    common["tau"] = s.tau
    if s.outer == "fedadam":
        return partial(fedadam.apply, **common, beta2=s.beta2), fedadam.starts(s.tau)
    if s.outer == "fedyogi":
        return partial(fedyogi.apply, **common, beta2=s.beta2), fedyogi.starts(s.tau)
    assert s.outer == "fedadagrad", s.outer
    return partial(fedadagrad.apply, **common), fedadagrad.starts(s.tau)
