"""A plan: which rank holds which layers, in which grid, under which schedule. Planners write it; the trainer runs it.

Units of the model are numbered 0 = embedding, 1..L = transformer blocks, L+1 = head (final norm and language-model
head). A chain that is not a transformer (a profile of separate operators, say) numbers its units 0..U-1 the same way.

With `virtual_stages` = v > 1 every grid row holds v chunks of the chain: chunk k runs on row k % stages, as looped
schedules do (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import field
from pathlib import Path
from typing import Any

from facility.exchange.errors import ConfigurationError
from facility.exchange.files.durable import write_json
from facility.exchange.json_values import read_values
from facility.exchange.schedules.registry import SCHEDULES
from facility.exchange.scheduling.policies import POLICIES
from facility.exchange.text import number_of
from facility.exchange.validation import check_format, parse_dataclass, validated

FORMAT = 1
MOST_MICRO_BATCHES = 1 << 20
"""Of a replica in one iteration: a schedule lists each of them."""


@validated(frozen=True, kw_only=True)
class Span:
    """Units [first_layer, end_layer) of the chain on one device."""

    device: int
    first_layer: int
    end_layer: int


@validated(frozen=True, kw_only=True)
class Sync:
    """How the replicas of a stage agree."""

    name: str = "allreduce"
    """Name of a synchronisation policy."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of that policy, by the policy's own names."""

    def __post_init__(self) -> None:
        POLICIES.get(self.name, "sync.name")


@validated(frozen=True, kw_only=True)
class CompressedLink:
    """What `source` sends to `destination` is encoded."""

    source: int
    destination: int
    codec: str
    """Name of the codec, as the trainer knows it."""
    ratio: float
    """Bytes sent divided by bytes before; below 1."""


@validated(frozen=True, kw_only=True)
class DeviceLoad:
    """What the plan asks of one device."""

    device: int
    seconds: float
    """Busy computing, seconds an iteration."""
    slack_seconds: float
    """Idle or communicating, seconds an iteration."""
    memory_bytes: float
    """Parameters, gradients, optimizer state and in-flight activations."""
    memory_limit_bytes: float | None = None


@validated(frozen=True, kw_only=True)
class Plan:
    """A complete layout of one facility, with what it is expected to cost and why it was chosen."""

    stages: int
    """Rows of the grid: devices in a pipeline."""
    replicas: int
    """Columns of the grid: copies of the pipeline."""
    grid: tuple[tuple[int, ...], ...]
    """`grid[stage][replica]` = device index = rank."""
    stage_units: tuple[tuple[int, ...], ...]
    """[first, end) of every chunk of the chain, in order; `stages * virtual_stages` entries."""
    spans: tuple[Span, ...] = ()
    """Units of each device; empty: derived from `grid` and `stage_units`."""
    virtual_stages: int = 1
    """Chunks of the chain a device holds; more than 1 only with interleaved schedules."""
    micro_batches: int | tuple[int, ...] = 1
    """Micro-batches an iteration, for each replica (one number: the same for all)."""
    micro_batch_samples: int = 1
    """Samples (sequences) in a micro-batch."""
    schedule: str = "1f1b"
    sync: Sync = field(default_factory=Sync)
    compressed_links: tuple[CompressedLink, ...] = ()
    predicted_seconds: float | None = None
    """Seconds of one iteration, as the method's model predicts."""
    predicted_parts: dict[str, float] = field(default_factory=dict)
    """Predicted seconds by part of the iteration; those whose name does not begin with `of_which_` sum to
    `predicted_seconds`."""
    lower_bound_seconds: float | None = None
    """No plan of this problem can be faster than this, in the same model."""
    gap: float | None = None
    """predicted / lower bound - 1; 0 is proven optimal."""
    cost: float | None = None
    """Value of the method's own objective (its unit is stated in `objective`)."""
    objective: str = ""
    method: str = ""
    seconds_used: float | None = None
    """Wall-clock seconds of planning."""
    seed: int = 0
    interrupted: bool = False
    """Planning was stopped by a signal; this is the best it had."""
    reasons: tuple[str, ...] = ()
    """Why this plan, one sentence each."""
    tried: tuple[dict[str, Any], ...] = ()
    """What else was tried and what it came to."""
    loads: tuple[DeviceLoad, ...] = ()
    device_ids: tuple[str, ...] = ()
    """Stable names of the devices by index: the launcher holds them against what it finds."""
    format: int = FORMAT

    def __post_init__(self) -> None:
        self._check_grid()
        self._check_stage_units()
        self._check_numbers()
        if isinstance(self.micro_batches, int):
            object.__setattr__(self, "micro_batches", (self.micro_batches,) * self.replicas)
        self._check_work()
        derived = self._derived_spans()
        if not self.spans:
            object.__setattr__(self, "spans", derived)
        elif set(self.spans) != set(derived) or len(self.spans) != len(derived):
            raise ConfigurationError("spans disagree with grid and stage_units; leave spans out to have them derived")

    @property
    def devices(self) -> list[int]:
        """Devices of the grid, row by row."""
        return [device for row in self.grid for device in row]

    def _check_grid(self) -> None:
        """Every device at one place of `stages` x `replicas`."""
        stages, replicas, devices = self.stages, self.replicas, self.devices
        if stages < 1 or replicas < 1 or self.virtual_stages < 1:
            raise ConfigurationError(
                f"stages={stages}, replicas={replicas}, virtual_stages={self.virtual_stages}, expected 1 or more each"
            )
        if len(self.grid) != stages or any(len(row) != replicas for row in self.grid):
            shape = f"{len(self.grid)} rows of {sorted({len(row) for row in self.grid})}"
            raise ConfigurationError(f"grid has {shape}, expected {stages} rows (stages) of {replicas} (replicas)")
        if repeated := sorted(d for d, count in Counter(devices).items() if count > 1):
            raise ConfigurationError(f"grid uses device {repeated[0]} more than once; a rank holds one place only")
        if any(device < 0 for device in devices):
            raise ConfigurationError(f"grid holds device {min(devices)}, expected 0 or more")

    def _check_stage_units(self) -> None:
        """Every unit of the chain in one chunk, in order."""
        chunks = self.stages * self.virtual_stages
        if len(self.stage_units) != chunks or any(len(pair) != 2 for pair in self.stage_units):
            raise ConfigurationError(
                f"stage_units has {len(self.stage_units)} entries, expected {chunks} pairs [first, end) "
                f"({self.stages} stages x {self.virtual_stages} virtual stages)"
            )
        expected = 0
        for number, (first, end) in enumerate(self.stage_units):
            if first != expected:
                what = f"unit {expected} is in no stage" if first > expected else f"unit {first} is in two stages"
                raise ConfigurationError(
                    f"stage_units[{number}] = [{first}, {end}): {what}; expected it to begin at {expected}"
                )
            if end <= first:
                raise ConfigurationError(f"stage_units[{number}] = [{first}, {end}) is empty; leave such a stage out")
            expected = end
        if not SCHEDULES.get(self.schedule, "schedule").interleaved and self.virtual_stages > 1:
            raise ConfigurationError(
                f"schedule {self.schedule!r} with virtual_stages={self.virtual_stages}; "
                "use interleaved_1f1b or interleaved_zero_bubble, or virtual_stages 1"
            )

    def _check_numbers(self) -> None:
        """What the plan predicts is finite."""
        for name in ("predicted_seconds", "lower_bound_seconds", "gap", "cost", "seconds_used"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ConfigurationError(f"{name} is {value}, expected a finite number")

    def _check_work(self) -> None:
        """Micro-batches for each replica, and encodings of links of the grid."""
        counts = self.replica_micro_batches
        if len(counts) != self.replicas or not all(1 <= count <= MOST_MICRO_BATCHES for count in counts):
            raise ConfigurationError(
                f"micro_batches is {str(list(counts)):.200}, expected {self.replicas} numbers of 1 to "
                f"{MOST_MICRO_BATCHES:,}"
            )
        if self.micro_batch_samples < 1:
            raise ConfigurationError(f"micro_batch_samples is {self.micro_batch_samples}, expected 1 or more")
        for link in self.compressed_links:
            if not {link.source, link.destination} <= set(self.devices) or not 0 < link.ratio <= 1:
                raise ConfigurationError(
                    f"compressed link {link} is not a link of the grid or its ratio is not in (0, 1]"
                )

    @property
    def replica_micro_batches(self) -> tuple[int, ...]:
        """Micro-batches an iteration of every replica."""
        assert not isinstance(self.micro_batches, int)
        return self.micro_batches

    @property
    def units(self) -> int:
        """Units of the chain this plan covers."""
        return self.stage_units[-1][1]

    @property
    def extent(self) -> str:
        """`2 stages x 1 replica`, for a person."""
        return f"{number_of(self.stages, 'stage')} x {number_of(self.replicas, 'replica')}"

    @property
    def world_size(self) -> int:
        """Devices in use."""
        return self.stages * self.replicas

    def place_of(self, device: int) -> tuple[int, int] | None:
        """(stage, replica) of a rank, or None if the plan leaves it idle."""
        for stage, row in enumerate(self.grid):
            if device in row:
                return stage, row.index(device)
        return None

    def units_of_stage(self, stage: int) -> tuple[tuple[int, int], ...]:
        """The chunks [first, end) that row `stage` holds, in order."""
        return tuple((pair[0], pair[1]) for pair in self.stage_units[stage :: self.stages])

    def _derived_spans(self) -> tuple[Span, ...]:
        return tuple(
            Span(device=device, first_layer=first, end_layer=end)
            for number, (first, end) in enumerate(self.stage_units)
            for device in self.grid[number % self.stages]
        )

    def validate(self, world_size: int, layers: int) -> None:
        """Refuse a plan that does not fit `world_size` ranks and a model of `layers` transformer blocks.

        Raises `ConfigurationError`: an unknown or idle rank, or units that are not exactly embedding + blocks + head.
        """
        if self.units != layers + 2:
            raise ConfigurationError(
                f"the plan covers {self.units} units, expected {layers + 2}: embedding, {layers} blocks, head; "
                "plan again for this model"
            )
        used = {device for row in self.grid for device in row}
        if unknown := sorted(device for device in used if device >= world_size):
            raise ConfigurationError(
                f"the plan uses rank {unknown[0]}, but there are {world_size} ranks (0..{world_size - 1}); "
                "start more ranks or plan again"
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)


def plan_from_json(raw: Any, *, file: Path | str | None = None) -> Plan:
    """Build a plan from plain values; raises `ConfigurationError` naming the key."""
    check_format(raw, FORMAT, file=file, update="update CrossFed where this plan is read")
    return parse_dataclass(Plan, raw, file=file)


OF_EVERY_PLAN = ("stages", "replicas", "grid", "stage_units")
"""Keys without which a file is not a plan."""


def read_plan(path: Path) -> Plan:
    """Read `plan.json`; raises `ConfigurationError`, which quotes nothing of a file that is not a plan.

    Settings name the file, and what is said of it leaves the facility.
    """
    raw = read_values(path)
    if not isinstance(raw, dict) or not set(OF_EVERY_PLAN) <= set(raw):
        raise ConfigurationError(
            f"is not a plan, expected a mapping with {', '.join(OF_EVERY_PLAN)} as `crossfed plan` writes it", file=path
        )
    return plan_from_json(raw, file=path)


def write_plan(path: Path, plan: Plan) -> None:
    """Write `plan` to `path`, atomically."""
    write_json(Path(path), plan.to_json())
