"""Waiting on a collective in slices of time: its own end counts, not that of a slice."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from facility.sync.runtime.process_groups import Channel, ExchangeFailed


class EndsAsItsSliceDoes:
    """A collective that ends after a slice of waiting ran out and before the waiter asks whether it has."""

    def __init__(self, work: Any, problem: str = "") -> None:
        self.work, self.problem = work, problem

    def wait(self, limit: timedelta | None = None) -> None:
        self.work.wait()
        if limit is not None:
            raise RuntimeError("Operation timed out!")  # torch 2.13's words
        if self.problem:
            raise RuntimeError(self.problem)

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())


@pytest.fixture
def channel(tmp_path: Path) -> Channel:
    backend = dist.ProcessGroupGloo(dist.FileStore(str(tmp_path / "store"), 1), 0, 1, timedelta(seconds=10))
    return Channel(backend, 10.0, lambda: False, torch.device("cpu"))


def test_what_ends_as_its_slice_does_has_taken_place(channel: Channel):
    tensor = torch.arange(4.0)
    channel.wait(EndsAsItsSliceDoes(channel.start_all_reduce(tensor)))
    assert tensor.tolist() == [0, 1, 2, 3]


def test_what_fails_as_its_slice_ends_is_told_by_its_own_error(channel: Channel):
    with pytest.raises(ExchangeFailed, match="Connection closed by peer"):
        channel.wait(EndsAsItsSliceDoes(channel.start_all_reduce(torch.ones(4)), "Connection closed by peer\nmore"))
