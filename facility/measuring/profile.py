"""profile.json: the measurements of `facility.measure`, as a planning problem without a batch.

The keys `devices`, `links` and `units` are those of a problem (see `coordinator.problem.problem`), every quantity with
its unit in its key. `profile` adds the raw measurements: seconds by device, kind of unit and micro-batch size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from facility.exchange.errors import ConfigurationError
from facility.exchange.files.durable import write_json

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class UnitTimes:
    """One kind of unit on one device."""

    kind: str
    samples: tuple[int, ...]
    """Micro-batch sizes that were tried."""
    forward_seconds: tuple[float, ...]
    """Median seconds of a micro-batch, by size."""
    backward_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.samples) == len(self.forward_seconds) == len(self.backward_seconds) > 0:
            raise ConfigurationError(f"times of {self.kind!r}: {len(self.samples)} sizes and another number of seconds")

    def line(self, name: str) -> tuple[float, float]:
        """(overhead a micro-batch, seconds a sample), neither negative: least squares over the sizes."""
        seconds = getattr(self, name)
        count = len(self.samples)
        if count == 1:
            return 0.0, seconds[0] / self.samples[0]
        mean_x, mean_y = sum(self.samples) / count, sum(seconds) / count
        spread = sum((x - mean_x) ** 2 for x in self.samples)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(self.samples, seconds, strict=True)) / spread
        through_origin = sum(x * y for x, y in zip(self.samples, seconds, strict=True)) / sum(
            x * x for x in self.samples
        )
        overhead = mean_y - slope * mean_x
        if overhead < 0:
            return 0.0, through_origin
        return (overhead, slope) if slope > 0 else (mean_y, 0.0)


@dataclass(frozen=True, kw_only=True)
class UnitSizes:
    """One kind of unit of the model; alike on every device."""

    kind: str
    parameter_bytes: float
    """What replicas exchange of it: gradients in float32."""
    state_bytes: float
    """Parameters, gradients and optimizer state, as found after one optimizer step."""
    activation_bytes: float
    """Sent to the next unit, bytes a sample."""
    stored_bytes: float
    """Kept between forward and backward, bytes a sample."""


@dataclass(frozen=True, kw_only=True)
class MeasuredDevice:
    """One rank."""

    id: str
    """Stable: host, device kind and local index."""
    site: str
    name: str
    """Name of the hardware."""
    memory_bytes: float
    """Free for the model."""
    times: tuple[UnitTimes, ...]

    def seconds(self, kind: str) -> float:
        """Forward and backward of the largest micro-batch tried."""
        (found,) = (t for t in self.times if t.kind == kind)
        return found.forward_seconds[-1] + found.backward_seconds[-1]


@dataclass(frozen=True, kw_only=True)
class SharedUplink:
    """Concurrent flows from `sources` to `destinations` got this much together."""

    name: str
    bytes_per_second: float
    sources: tuple[int, ...]
    destinations: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class RunningCosts:
    """What running pipelines and replicas costs besides units and bytes; see `coordinator.problem.runtime`."""

    pass_seconds: float
    replica_forward_seconds: float
    replica_backward_seconds: float
    agreement_seconds: float
    step_seconds: float

    def to_json(self) -> dict[str, Any]:
        """A problem's `runtime`: the trainer's pipelines wait for their messages, and gradients are sent at the end."""
        seconds = {name.replace("_seconds", "_ms"): 1e3 * value for name, value in asdict(self).items()}
        return {"transport": "blocking", "overlap": False, **seconds}


@dataclass(frozen=True, kw_only=True)
class Profile:
    """All of an allocation."""

    devices: tuple[MeasuredDevice, ...]
    latency_seconds: tuple[tuple[float, ...], ...]
    """[sender][receiver]; half a round trip, as one-way times need a common clock."""
    bytes_per_second: tuple[tuple[float, ...], ...]
    """[sender][receiver]; each direction by itself."""
    shared: tuple[SharedUplink, ...] = ()
    chain: tuple[str, ...]
    """Kind of every unit of the model, in order."""
    sizes: tuple[UnitSizes, ...]
    update_seconds: Mapping[str, float] = field(default_factory=dict)
    """Kind of unit -> one optimizer step on the reference device."""
    stalls: Mapping[str, float] = field(default_factory=dict)
    """Probability and seconds of what devices lose before a forward or backward; empty: nothing is known of any."""
    running: RunningCosts | None = None
    """None: one rank alone."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Settings, versions, emulation."""

    def reference(self) -> int:
        """The device whose seconds the units are given in: the fastest for one sample of the whole chain."""
        return min(
            range(len(self.devices)), key=lambda d: (sum(self.devices[d].seconds(kind) for kind in self.chain), d)
        )

    def to_json(self) -> dict[str, Any]:
        """A problem without a batch, and the raw measurements."""
        reference = self.devices[self.reference()]
        sizes = {unit.kind: unit for unit in self.sizes}
        times = {unit.kind: unit for unit in reference.times}
        units: list[dict[str, Any]] = []
        for kind in self.chain:
            if units and units[-1]["kind"] == kind:
                units[-1]["count"] += 1
                continue
            forward, backward = times[kind].line("forward_seconds"), times[kind].line("backward_seconds")
            size = sizes[kind]
            units.append(
                {
                    "kind": kind,
                    "count": 1,
                    "parameter_bytes": size.parameter_bytes,
                    "state_bytes": size.state_bytes,
                    "activation_bytes": size.activation_bytes,
                    "stored_bytes": size.stored_bytes,
                    "forward_ms": 1e3 * forward[1],
                    "backward_ms": 1e3 * backward[1],
                    "forward_overhead_ms": 1e3 * forward[0],
                    "backward_overhead_ms": 1e3 * backward[0],
                    "update_ms": 1e3 * self.update_seconds.get(kind, 0.0),
                }
            )
        return {
            "format": FORMAT,
            "devices": [self._device(device, reference) for device in self.devices],
            "links": {
                "latency_ms": _rows(self.latency_seconds, 1e3),
                "bandwidth_megabytes_per_second": _rows(self.bytes_per_second, 1e-6),
                "shared": [
                    {
                        "name": link.name,
                        "bandwidth_megabytes_per_second": link.bytes_per_second / 1e6,
                        "sources": list(link.sources),
                        "destinations": list(link.destinations),
                    }
                    for link in self.shared
                ],
            },
            "units": units,
            **({"stalls": dict(self.stalls)} if self.stalls else {}),
            **({} if self.running is None else {"runtime": self.running.to_json()}),
            "profile": {
                **self.details,
                "reference_device": reference.id,
                "seconds": [{"id": d.id, "name": d.name, "kinds": [asdict(t) for t in d.times]} for d in self.devices],
            },
        }

    def _device(self, device: MeasuredDevice, reference: MeasuredDevice) -> dict[str, Any]:
        kinds = sorted(set(self.chain))
        whole = sum(device.seconds(k) for k in self.chain) / sum(reference.seconds(k) for k in self.chain)
        return {
            "id": device.id,
            "name": device.name,
            "site": device.site,
            "memory_bytes": device.memory_bytes,
            "slowdown": whole,
            "slowdown_by_kind": {kind: device.seconds(kind) / reference.seconds(kind) for kind in kinds},
        }


def _rows(matrix: Sequence[Sequence[float]], factor: float) -> list[list[float | None]]:
    """Rows with null on the diagonal: a device's link to itself is not measured."""
    return [
        [None if i == j or not math.isfinite(value) else value * factor for j, value in enumerate(row)]
        for i, row in enumerate(matrix)
    ]


def write_profile(path: Path, profile: Profile) -> None:
    """Write profile.json, atomically."""
    write_json(Path(path), profile.to_json())
