"""What the simulator needs to know of a layout, as plain arrays: a grid of devices with its times, bytes and links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from coordinator.simulation.pipelines.graph import Transport
from facility.exchange.errors import InputError

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Uplink:
    """A link that several pairs of devices share, such as a site's way out."""

    name: str
    bytes_per_second: float
    pairs: frozenset[tuple[int, int]]
    """The (source, destination) device pairs whose traffic crosses it."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A grid of `stages` x `replicas` devices that trains one chain of chunks. Chunk k is on row k % stages."""

    grid: tuple[tuple[int, ...], ...]
    """`grid[stage][replica]` = device."""
    virtual_stages: int = 1
    """Chunks a device holds."""
    schedule: str = "1f1b"
    micro_batches: tuple[int, ...]
    """An iteration's micro-batches of every replica."""
    micro_batch_samples: int = 1
    forward_seconds: Array
    """[chunk, replica]: one micro-batch."""
    backward_seconds: Array
    """[chunk, replica]: one micro-batch, for inputs and weights together."""
    weight_share: float = 0.5
    """The part of a backward that is for the weights; zero-bubble schedules may do it later."""
    cut_bytes: Array
    """[chunk - 1]: activations of one micro-batch after each chunk but the last; gradients have the same size."""
    gradient_bytes: Array
    """[chunk]: what replicas exchange to synchronise a chunk, in one direction."""
    buckets: tuple[int, ...] = ()
    """Per chunk: pieces in which gradients become ready during the last backward; (): one piece, so no overlap."""
    in_flight_bytes: Array | None = None
    """[chunk]: activations kept for the backward, of one micro-batch."""
    static_bytes: Array | None = None
    """[chunk]: parameters, gradients and optimizer state."""
    optimizer_seconds: Array | None = None
    """[chunk, replica]: the optimizer's step."""
    latency: Array
    """[device, device]: seconds."""
    bandwidth: Array
    """[device, device]: bytes per second."""
    uplinks: tuple[Uplink, ...] = ()
    compression: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    """(source, destination) -> bytes sent / bytes, and seconds of encoding and decoding per byte before."""
    sync: str = "allreduce"
    sync_every: int = 1
    """Iterations between synchronisations."""
    transport: Transport = "streaming"
    overlap: bool = True
    """True if buckets of gradients travel while the last backward goes on; else after it, one after the other."""
    agreement_seconds: float = 0.0
    """Of every bucket, besides latency and bytes."""
    step_seconds: float = 0.0
    """Of every iteration, after the optimizer's own."""

    def __post_init__(self) -> None:
        stages, replicas, chunks = self.stages, self.replicas, self.chunks
        expected = {
            "forward_seconds": (self.forward_seconds.shape, (chunks, replicas)),
            "backward_seconds": (self.backward_seconds.shape, (chunks, replicas)),
            "cut_bytes": (self.cut_bytes.shape, (chunks - 1,)),
            "gradient_bytes": (self.gradient_bytes.shape, (chunks,)),
            "micro_batches": ((len(self.micro_batches),), (replicas,)),
        }
        for name, (found, wanted) in expected.items():
            if found != wanted:
                raise InputError(f"{name} has shape {found}, expected {wanted} ({stages} stages x {replicas} replicas)")
        for name in ("forward_seconds", "backward_seconds", "cut_bytes", "gradient_bytes"):
            values = getattr(self, name)
            if not np.isfinite(values).all() or (values < 0).any():
                raise InputError(f"{name} holds a negative or non-finite number, expected 0 or more")
        for first, second in self.pairs():
            if not self.bandwidth[first, second] > 0:
                raise InputError(
                    f"devices {first} and {second} cannot reach each other (bandwidth "
                    f"{self.bandwidth[first, second]}), but the layout sends between them; choose another grid"
                )

    @property
    def stages(self) -> int:
        return len(self.grid)

    @property
    def replicas(self) -> int:
        return len(self.grid[0])

    @property
    def chunks(self) -> int:
        return self.stages * self.virtual_stages

    def pairs(self) -> set[tuple[int, int]]:
        """Device pairs along the pipelines, in both directions."""
        result: set[tuple[int, int]] = set()
        for cut in range(self.chunks - 1):
            for a, b in zip(self.grid[cut % self.stages], self.grid[(cut + 1) % self.stages], strict=True):
                if a != b:
                    result |= {(a, b), (b, a)}
        return result

    def sent_bytes(self, source: int, target: int, size: float) -> float:
        """What `size` bytes become on that link."""
        return size * self.compression.get((source, target), (1.0, 0.0))[0]

    def delay(self, source: int, target: int, size: float, steps: int = 1) -> float:
        """Seconds a message needs besides occupying the link: latency of its `steps`, encoding and decoding."""
        coding = self.compression.get((source, target), (1.0, 0.0))[1] * size
        return steps * float(self.latency[source, target]) + coding

    def uplinks_of(self, source: int, target: int) -> tuple[int, ...]:
        return tuple(n for n, uplink in enumerate(self.uplinks) if (source, target) in uplink.pairs)

    def compute_table(self) -> Array:
        """[kind, chunk, replica] seconds, as `orders.Kind` numbers the kinds."""
        backward = self.backward_seconds
        inputs, weights = backward * (1 - self.weight_share), backward * self.weight_share
        if self.transport == "blocking":  # torch runs the first chunk's backward whole, where the weights' part is due
            inputs[0], weights[0] = 0.0, backward[0]
        return np.stack([self.forward_seconds, backward, inputs, weights])

    def message_tables(self) -> tuple[Array, Array]:
        """[direction, cut, replica] seconds that a message occupies its link, and its latency."""
        shape = (2, max(self.chunks - 1, 0), self.replicas)
        occupied, latency = np.zeros(shape), np.zeros(shape)
        for cut in range(self.chunks - 1):
            rows = self.grid[cut % self.stages], self.grid[(cut + 1) % self.stages]
            for replica, (a, b) in enumerate(zip(*rows, strict=True)):
                if a == b:
                    continue
                for direction, (source, target) in enumerate(((a, b), (b, a))):
                    size = float(self.cut_bytes[cut])
                    sent = self.sent_bytes(source, target, size)
                    occupied[direction, cut, replica] = sent / self.bandwidth[source, target]
                    latency[direction, cut, replica] = self.delay(source, target, size)
        return occupied, latency
