"""A planning problem: devices, links, the model's chain of units, the batch, and the allowed choices.

A problem as JSON (`facility.measure` writes the same keys; every quantity carries its unit in its key, see
`quantities`; `runtime` and `objective` are explained in the modules of those names; rows of the matrices in `links` are
senders, columns receivers; "count": N in a unit means N equal units):

    {"format": 1,
     "devices": [{"id": "node1:0", "site": "a", "memory_gigabytes": 16, "slowdown": 1.0,
                  "slowdown_by_kind": {"head": 1.2}}],
     "links":   {"latency_ms": [[...]], "bandwidth_gbit_per_s": [[...]],
                 "shared": [{"name": "a-b", "bandwidth_gbit_per_s": 10, "sources": [0, 1], "destinations": [2, 3]}]},
     "units":   [{"kind": "embedding", "parameter_megabytes": 8, "state_megabytes": 32, "activation_megabytes": 1,
                  "stored_megabytes": 1, "forward_ms": 1, "backward_ms": 2,
                  "forward_overhead_ms": 0.1, "backward_overhead_ms": 0.1}],
     "batch_samples": 64, "micro_batch_samples": [1, 2], "stages": [], "replicas": [], "schedules": ["gpipe", "1f1b"],
     "syncs": ["allreduce"], "codecs": [{"name": "int8", "ratio": 0.51, "seconds_per_byte": 2e-9}], "local_steps": 1,
     "runtime": {"transport": "blocking", "overlap": false, "pass_ms": 1, "agreement_ms": 0.5},
     "policies": ["partial_reduce"], "stalls": {"probability": 0.1, "seconds": 0.1},
     "objective": "iteration_seconds"}
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from coordinator.problem.required import require, require_finite
from coordinator.problem.runtime import Runtime
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.emulation import Emulation
from facility.exchange.schedules.registry import SCHEDULES
from facility.exchange.scheduling.policies import POLICIES, lockstep_names
from facility.exchange.validation import validated

FORMAT = 1

OBJECTIVES = ("iteration_seconds", "tokens_per_second", "device_hours")
Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Device:
    """One rank of an allocation."""

    id: str
    """Stable name, such as host and local index."""
    site: str = ""
    """Devices of one site share its uplink."""
    memory_bytes: float | None = None
    """Free for the model; None: not limited."""
    slowdown: float = 1.0
    """Seconds here divided by seconds on the reference device."""
    slowdown_by_kind: dict[str, float] = field(default_factory=dict)
    """`slowdown` of single kinds of unit, in its place."""
    price: float = 1.0
    """Device-hours that an hour of it counts as (the objective device_hours)."""

    def __post_init__(self) -> None:
        for name, value in {"slowdown": self.slowdown, **self.slowdown_by_kind}.items():
            require(
                math.isfinite(value) and value > 0,
                f"slowdown ({name}) of device {self.id!r} is {value}, expected more than 0",
            )
        require(
            math.isfinite(self.price) and self.price > 0,
            f"price of device {self.id!r} is {self.price}, expected more than 0",
        )
        if self.memory_bytes is not None:
            require(
                math.isfinite(self.memory_bytes) and self.memory_bytes > 0,
                f"memory of device {self.id!r} is {self.memory_bytes} bytes, expected more than 0; "
                "free the device or leave it out",
            )

    def factor(self, kind: str) -> float:
        """Multiple of the reference seconds for units of `kind`."""
        return self.slowdown_by_kind.get(kind, self.slowdown)


@dataclass(frozen=True, kw_only=True)
class SharedLink:
    """Concurrent flows from `sources` to `destinations` share this bandwidth (a site's uplink, say)."""

    name: str
    bandwidth_bytes_per_second: float
    sources: tuple[int, ...]
    destinations: tuple[int, ...]

    def __post_init__(self) -> None:
        value = self.bandwidth_bytes_per_second
        require(math.isfinite(value) and value > 0, f"shared link {self.name!r} has bandwidth {value}, expected > 0")


@dataclass(frozen=True, kw_only=True)
class Links:
    """Latency and bandwidth from every device (row) to every other (column); the diagonal is ignored."""

    latency_seconds: Matrix
    bandwidth_bytes_per_second: Matrix
    shared: tuple[SharedLink, ...] = ()

    def check(self, devices: tuple[Device, ...]) -> None:
        """Raise `ConfigurationError` unless the matrices fit `devices` and every pair is reachable."""
        count = len(devices)
        for name in ("latency_seconds", "bandwidth_bytes_per_second"):
            rows = getattr(self, name)
            widths = sorted({len(row) for row in rows})
            require(
                len(rows) == count and widths == [count],
                f"links.{name} is {len(rows)} rows of {widths}, expected {count} x {count} (one row a device)",
            )
        off = ~np.eye(count, dtype=bool)

        def first(mask: np.ndarray) -> str:
            i, j = np.argwhere(mask)[0]
            return f"{devices[i].id!r} to {devices[j].id!r}"

        latency, bandwidth = np.array(self.latency_seconds), np.array(self.bandwidth_bytes_per_second)
        for name, values in {"latency": latency, "bandwidth": bandwidth}.items():
            if (bad := off & np.isnan(values)).any():
                raise ConfigurationError(f"{name} from {first(bad)} is not a number; measure it again")
        if (bad := off & np.isinf(latency)).any():
            raise ConfigurationError(f"no route from {first(bad)} (infinite latency); every pair must be reachable")
        if (bad := off & (latency < 0)).any():
            raise ConfigurationError(f"latency from {first(bad)} is negative; measure it again")
        if (bad := off & ~(bandwidth > 0)).any():
            raise ConfigurationError(
                f"bandwidth from {first(bad)} is {bandwidth[bad][0]:g}, expected more than 0; "
                "leave out the device that cannot be reached"
            )
        for group in self.shared:
            for device in (*group.sources, *group.destinations):
                require(
                    0 <= device < count, f"shared link {group.name!r} names device {device}; there are 0..{count - 1}"
                )


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One link of the chain: the smallest part of the model that a plan may cut after."""

    kind: str
    parameter_bytes: float
    """What replicas must agree on every step (gradient bytes)."""
    state_bytes: float
    """Resident: parameters, gradients and optimizer state."""
    gathered_bytes: float = 0.0
    """Beside these where all-reduce keeps the replicas of several stages together: weights that FSDP2 gathers."""
    activation_bytes: float
    """Sent to the next unit, bytes a sample."""
    stored_bytes: float = 0.0
    """Kept between forward and backward, bytes a sample in flight."""
    forward_seconds: float
    """Seconds a sample on the reference device."""
    backward_seconds: float
    forward_overhead_seconds: float = 0.0
    """Seconds a micro-batch, however small."""
    backward_overhead_seconds: float = 0.0
    update_seconds: float = 0.0
    """The optimizer's step on the reference device."""

    def __post_init__(self) -> None:
        require_finite(**{f"{self.kind}.{k}": v for k, v in vars(self).items() if k != "kind"})


@validated(frozen=True, kw_only=True)
class Codec:
    """A compression that a link may use."""

    name: str
    ratio: float
    """Bytes after divided by bytes before."""
    seconds_per_byte: float = 0.0
    """Encoding plus decoding, per byte before."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything a planner may know of a facility, a model and a batch."""

    devices: tuple[Device, ...]
    links: Links
    units: tuple[Unit, ...]
    batch_samples: int
    """Samples of one optimizer step over all replicas."""
    micro_batch_samples: tuple[int, ...] = (1,)
    """Allowed sizes of a micro-batch."""
    stages: tuple[int, ...] = ()
    """Allowed pipeline depths; empty: any."""
    replicas: tuple[int, ...] = ()
    """Allowed numbers of replicas; empty: any."""
    schedules: tuple[str, ...] = ("gpipe", "1f1b")
    syncs: tuple[str, ...] = ("allreduce", "sharded_ps", "central_ps")
    codecs: tuple[Codec, ...] = ()
    """Of the compressed links that a plan to be simulated may have; no planner plans any, as the trainer has none."""
    local_steps: int = 1
    """Optimizer steps between two agreements of the replicas."""
    runtime: Runtime = field(default_factory=Runtime)
    policies: tuple[str, ...] = ()
    """Policies without lockstep that the replicas may follow: those declared as `planned`."""
    stalls: Emulation = field(default_factory=Emulation)
    """What devices lose at random before a forward or backward (only `policies` are judged by it)."""
    objective: str = "iteration_seconds"
    """What is to be least: one of `OBJECTIVES` (`coordinator.problem.objective`)."""
    sample_tokens: int = 0
    """Length of a sample, tokens; 0: unknown (only the objective tokens_per_second needs it)."""
    name: str = ""
    format: int = FORMAT

    def __post_init__(self) -> None:
        require(bool(self.devices), "the problem has no devices")
        require(bool(self.units), "the problem has no units (layers)")
        ids = [device.id for device in self.devices]
        if len(set(ids)) < len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise ConfigurationError(f"two devices are called {twice!r}; ids must be unique")
        self.links.check(self.devices)
        require(self.batch_samples >= 1, f"batch_samples is {self.batch_samples}, expected 1 or more")
        require(self.local_steps >= 1, f"local_steps is {self.local_steps}, expected 1 or more")
        for name in ("micro_batch_samples", "stages", "replicas"):
            require(all(v >= 1 for v in getattr(self, name)), f"{name} holds a number below 1")
        require(bool(self.micro_batch_samples), "micro_batch_samples is empty, expected at least one size")
        planned = [name for name, policy in POLICIES.built_in.items() if policy.planned]
        for name, known in (
            ("schedules", tuple(SCHEDULES.built_in)),
            ("syncs", lockstep_names()),
            ("policies", tuple(planned)),
        ):
            for value in getattr(self, name):
                require(value in known, f"{name} holds {value!r}, expected some of {', '.join(known)}")
            require(
                name == "policies" or bool(getattr(self, name)), f"{name} is empty, expected some of {', '.join(known)}"
            )
        require(
            self.objective in OBJECTIVES, f"objective is {self.objective!r}, expected one of {', '.join(OBJECTIVES)}"
        )
        require(self.sample_tokens >= 0, f"sample_tokens is {self.sample_tokens}, expected 0 or more")
        require(
            self.objective != "tokens_per_second" or self.sample_tokens > 0,
            "the objective tokens_per_second needs sample_tokens (the length of a sample)",
        )
        for codec in self.codecs:
            require(0 < codec.ratio <= 1, f"codec {codec.name!r} has ratio {codec.ratio}, expected in (0, 1]")

    @property
    def whole_sizes(self) -> tuple[int, ...]:
        """The allowed micro-batch sizes that divide the batch. Raises `ConfigurationError` where none does."""
        sizes = tuple(size for size in self.micro_batch_samples if self.batch_samples % size == 0)
        what = f"batch_samples {self.batch_samples} is not a multiple of any allowed micro_batch_samples"
        require(bool(sizes), f"{what} {list(self.micro_batch_samples)}; change one of them")
        return sizes

    @cached_property
    def latency(self) -> np.ndarray:
        """[sender, receiver] seconds; 0 on the diagonal."""
        array = np.array(self.links.latency_seconds, dtype=float)
        np.fill_diagonal(array, 0.0)
        return array

    @cached_property
    def bandwidth(self) -> np.ndarray:
        """[sender, receiver] bytes per second; infinite on the diagonal."""
        array = np.array(self.links.bandwidth_bytes_per_second, dtype=float)
        np.fill_diagonal(array, np.inf)
        return array

    @cached_property
    def memory(self) -> np.ndarray:
        """Bytes a device; infinite where not limited."""
        return np.array([np.inf if d.memory_bytes is None else d.memory_bytes for d in self.devices])

    @cached_property
    def factors(self) -> np.ndarray:
        """[device, unit] multiples of the reference seconds."""
        kinds = sorted({unit.kind for unit in self.units})
        table = np.array([[device.factor(kind) for kind in kinds] for device in self.devices])
        return table[:, [kinds.index(unit.kind) for unit in self.units]]

    def forward_seconds(self, micro_batch_samples: int) -> np.ndarray:
        """[device, unit] seconds of one micro-batch forward."""
        seconds = self.per_unit("forward_overhead_seconds") + micro_batch_samples * self.per_unit("forward_seconds")
        return self.factors * seconds

    def backward_seconds(self, micro_batch_samples: int) -> np.ndarray:
        """[device, unit] seconds of one micro-batch backward."""
        seconds = self.per_unit("backward_overhead_seconds") + micro_batch_samples * self.per_unit("backward_seconds")
        return self.factors * seconds

    def per_unit(self, name: str) -> np.ndarray:
        """One field of every unit, such as `activation_bytes`; gathered once, and not to be written to."""
        gathered = self.__dict__.setdefault("_per_unit", {})
        if name not in gathered:
            gathered[name] = np.array([getattr(unit, name) for unit in self.units], dtype=float)
            gathered[name].setflags(write=False)
        return gathered[name]
