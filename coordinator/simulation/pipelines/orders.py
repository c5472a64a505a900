"""In which order a rank computes, and what it waits for: as `torch.distributed.pipelining` executes it."""

from __future__ import annotations

from functools import lru_cache

from facility.exchange.errors import ConfigurationError
from facility.exchange.schedules.ops import Op
from facility.exchange.schedules.registry import SCHEDULES


@lru_cache(maxsize=256)
def order(schedule: str, stages: int, virtual_stages: int, micro_batches: int) -> tuple[tuple[Op, ...], ...]:
    """The ops of every rank, in its order. Raises `ConfigurationError` for what the schedule cannot do."""
    if stages < 1 or virtual_stages < 1 or micro_batches < 1:
        raise ConfigurationError(
            f"stages={stages}, virtual_stages={virtual_stages}, micro_batches={micro_batches}, expected 1 or more each"
        )
    if virtual_stages != 1 and not SCHEDULES.get(schedule).interleaved:
        raise ConfigurationError(f"schedule {schedule!r} with virtual_stages={virtual_stages}, expected 1")
    ranks: tuple[tuple[Op, ...], ...] = SCHEDULES.load(schedule)(stages, virtual_stages, micro_batches)
    return ranks
