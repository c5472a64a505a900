"""Running statistics of batch normalisation: each rank's own while it trains, averaged where they leave it.

Every rank normalises by the images that it holds (no statistics are exchanged within a step), and its running mean and
variance follow those. Before weights are evaluated, kept or sent, the ranks take the mean of them. Running statistics
are exponential averages, linear in what they saw: averaging them earlier as well changes nothing at the end.

The counter `num_batches_tracked` is only read by a batch norm without momentum. It is a whole number, which no rule
averages: it stays as received.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from facility.exchange.checkpoints.layouts import batch_norms
from facility.exchange.checkpoints.running_statistics import AVERAGED, VARIANCE
from facility.exchange.errors import InputError
from facility.training.processes.ranks import Ranks
from facility.training.shards import LocalShard


def statistics_names(model: nn.Module) -> set[str]:
    """Names in the model of the buffers that are averaged."""
    return {name + end for name in batch_norms(model) for end in AVERAGED}


@contextmanager
def keeping_statistics(model: nn.Module) -> Iterator[None]:
    """Inside, forward passes leave the running statistics as they are: of a batch that stands for an empty share."""
    trained = [module for module in batch_norms(model).values() if module.training]
    for module in trained:
        module.eval()
    try:
        yield
    finally:
        for module in trained:
            module.train()


def check_variances(statistics: Sequence[LocalShard]) -> None:
    """Refuse variances below zero. Raises `InputError`."""
    for part in statistics:
        if part.name.endswith(VARIANCE) and bool((part.tensor < 0).any()):
            raise InputError(
                f"the received {part.name} holds a variance below zero, which no batch norm has: take another model"
            )


@torch.no_grad()
def average_statistics(statistics: Sequence[LocalShard], ranks: Ranks, group: dist.ProcessGroup | None) -> None:
    """Replace the running statistics on every rank of the group by their mean; None: all ranks."""
    if ranks.world == 1 or not statistics:
        return
    group = dist.group.WORLD if group is None else group
    flat = torch.cat([part.tensor.reshape(-1) for part in statistics]).double()
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for part, piece in zip(statistics, flat.split([part.tensor.numel() for part in statistics]), strict=True):
        part.tensor.copy_(piece.view_as(part.tensor))
