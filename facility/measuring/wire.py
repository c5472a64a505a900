"""Sending between ranks, over links as they are or slowed down inside the process (no root needed).

An emulated link delays every message by its latency and its bytes / bandwidth. Where flows share an uplink, they book
time on it in small pieces through the store that all ranks see, so that concurrent flows really get their part. The
booking uses the host's monotonic clock, so ranks that share an emulated uplink must run on one host.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from facility.training.devices import synchronize

PIECE_SECONDS = 0.002
"""Time on a shared uplink that one booking takes."""


@dataclass(frozen=True, kw_only=True)
class EmulatedUplink:
    """Flows from `sources` to `destinations` share this bandwidth."""

    name: str
    bytes_per_second: float
    sources: frozenset[int]
    destinations: frozenset[int]


@dataclass(frozen=True, kw_only=True)
class EmulatedLinks:
    """Links by (source, destination) rank; pairs that are absent are as fast as they are."""

    latency_seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    bytes_per_second: dict[tuple[int, int], float] = field(default_factory=dict)
    uplinks: tuple[EmulatedUplink, ...] = ()


class Wire:
    """Point-to-point messages of one rank."""

    def __init__(self, rank: int, device: torch.device, emulated: EmulatedLinks, store: Any = None) -> None:
        self.rank, self.device, self.emulated, self.store = rank, device, emulated, store

    def send(self, tensor: torch.Tensor, target: int) -> None:
        """Send and wait until it has left; over an emulated link, as long as that link would take."""
        self._slow_down(target, tensor.numel() * tensor.element_size())
        dist.send(tensor, target)
        synchronize(self.device)

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        dist.recv(tensor, source)
        synchronize(self.device)

    def _slow_down(self, target: int, size: int) -> None:
        pair = (self.rank, target)
        begin = time.monotonic()
        rate = self.emulated.bytes_per_second.get(pair)
        through = begin + (size / rate if rate else 0.0)
        for uplink in self.emulated.uplinks:
            if self.rank in uplink.sources and target in uplink.destinations:
                through = max(through, self._book(uplink, size))
        due = through + self.emulated.latency_seconds.get(pair, 0.0)
        time.sleep(max(0.0, due - time.monotonic()))

    def _book(self, uplink: EmulatedUplink, size: int) -> float:
        """Pass `size` bytes through a shared uplink, piece by piece; returns when the last piece is through.

        Time since `begin` in which nobody had booked the uplink is booked first: the message waited to go through then,
        and only this process came late to say so.
        """
        assert self.store is not None, "a shared uplink needs the ranks' store"
        left, begin = float(size), time.monotonic()
        through = begin
        while left > 0:
            piece = min(left, uplink.bytes_per_second * PIECE_SECONDS)
            through = self._book_piece(f"uplink/{uplink.name}", piece / uplink.bytes_per_second, begin)
            left -= piece
            time.sleep(max(0.0, through - time.monotonic()))
        return through

    def _book_piece(self, key: str, seconds: float, begin: float) -> float:
        """Book `seconds` after what is booked already, not before `begin`; atomically, by compare and set.

        An entry names its rank beside its end: two ranks that book from one moment on would write one text, and the
        second would take the first one's entry for its own.
        """
        known = ""
        while True:
            until = max(begin, float(known.split()[0]) if known else 0.0) + seconds
            entry = f"{until!r} {self.rank}"
            answer = self.store.compare_set(key, known, entry).decode()
            if answer == entry:
                return until
            known = answer
