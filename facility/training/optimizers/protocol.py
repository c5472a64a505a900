"""What the trainer asks of an inner optimizer beyond `torch.optim.Optimizer`: what it keeps, so that it can be saved.

State tensors lie on disk whole, by `KIND.PARAMETER`, so that a later round may shard them otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.optimizers import OPTIMIZERS
from facility.exchange.messages.settings import TrainingSettings
from facility.training.shards import LocalShard

Shape = tuple[int, ...]


class Optimizer(Protocol):
    """A torch optimizer over the shards a rank holds."""

    param_groups: list[dict[str, Any]]
    state: dict[torch.Tensor, dict[str, Any]]

    def step(self) -> Any:
        """One step with the gradients in place; the learning rate is each group's `lr`."""

    def kept(self, name: str, shape: Shape) -> Mapping[str, Shape]:
        """State of a parameter, by kind, with the shape of the whole tensor. The same on every rank."""

    def shards(self, part: LocalShard) -> Sequence[LocalShard]:
        """The state of a parameter held here, named `KIND.PARAMETER`; made as zeros where there is none yet."""


def optimizer_of(parts: Sequence[LocalShard], settings: TrainingSettings) -> Any:
    """The optimizer that the settings name, over this rank's rows.

    Raises `ConfigurationError` for a class that does not say what it keeps, such as `torch.optim.SGD`.
    """
    values = OPTIMIZERS.get(settings.optimizer).values(settings.optimizer_parameters)
    found = OPTIMIZERS.load(settings.optimizer)
    if isinstance(found, type) and (lacks := [one for one in ("kept", "shards") if not hasattr(found, one)]):
        raise ConfigurationError(
            f"training.optimizer is {settings.optimizer!r}, which has no method {' and no '.join(lacks)}: expected "
            f"{', '.join(OPTIMIZERS.names())}, or a class with the methods of facility/training/optimizers/protocol.py"
        )
    return found(parts, settings, values)
