"""One pass of the kernel: what it is given, what it finds out, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from coordinator.aggregation.rules.contract import Combine, TensorCoefficients
from coordinator.aggregation.server_optimizers.contract import Step
from coordinator.aggregation.unmasking import Unmasking
from facility.exchange.checkpoints import native
from facility.exchange.checkpoints.checkpoint import TensorEntry
from facility.exchange.checkpoints.floats import Array
from facility.exchange.checkpoints.writer import TensorWriter
from facility.exchange.errors import InputError
from facility.exchange.files.streamed_digest import StreamedDigest


class SeesSteps(Protocol):
    """Sees the steps of every update, piece by piece and from any thread."""

    def take(self, name: str, begin: int, steps: Array) -> None:
        """`steps`: (updates, n), of the elements of a tensor from `begin` on."""


class SeesValues(Protocol):
    """Sees the values of every update, part by part and from any thread."""

    def take(self, name: str, begin: int, values: Sequence[Array], dtypes: Sequence[str]) -> None:
        """`values`: of each update as stored in its dtype, the elements of a tensor from `begin` on, in a buffer that
        is used again."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One pass: what is read, what is computed, what is written."""

    base: Mapping[str, TensorEntry]
    """The federated floating-point tensors of the model that was sent."""
    updates: Sequence[Mapping[str, TensorEntry]]
    """By facility, in the fixed order."""
    coefficients: TensorCoefficients | None = None
    """Of each tensor's linear combination; where they are None, `combine` works value by value, or nothing is
    combined."""
    combine: Combine | None = None
    unmasking: Unmasking | None = None
    """The updates are masked: this makes the step of the round from them, and no step of one update exists."""
    master: Mapping[str, TensorEntry] = field(default_factory=dict)
    """Tensors absent here start from the base."""
    slots: Sequence[Mapping[str, TensorEntry]] = ()
    """The server optimiser's tensors of the round before, by slot; absent ones start from `slot_starts`."""
    slot_starts: Sequence[float] = ()
    step: Step | None = None
    """None: the step is added."""
    float64: bool = False
    statistics: str = "exact"
    """`exact`, `sample` or `off`: how many values count for inner products and for the norm of the round's step."""
    products: bool = True
    """Whether the inner products are summed; not where an earlier pass over the same updates did."""
    by_tensor: bool = False
    """Whether the inner products are also kept for every tensor."""
    momentum: bool = False
    """The first slot is the server optimizer's momentum, and the rule looks at it: a pass that writes nothing measures
    the steps' inner products with it by tensor, `combine` gets it as the last row of its steps."""
    observe: Callable[[Array], None] | None = None
    """Sees every (updates, n) block of steps, from any thread."""
    walk: SeesSteps | None = None
    """Makes the mean walk of the steps, where drift is corrected."""
    values: SeesValues | None = None
    """Sees what the updates hold."""
    hashed: Mapping[Path, StreamedDigest] = field(default_factory=dict)
    """Files of the base, the state and the updates that are hashed as they are read."""
    model: TensorWriter | None = None
    new_master: TensorWriter | None = None
    new_slots: Sequence[TensorWriter] = ()

    @property
    def masked(self) -> Sequence[Mapping[str, TensorEntry]]:
        """The updates, where they are masked: only their sum is worked on."""
        return self.updates if self.unmasking is not None else ()

    @property
    def plain(self) -> Sequence[Mapping[str, TensorEntry]]:
        """The updates, where they are not masked."""
        return self.updates if self.unmasking is None else ()

    @property
    def sources(self) -> Sequence[Mapping[str, TensorEntry]]:
        """What is read into a buffer each: the base, the updates but masked ones, the master and the slots."""
        return (self.base, *self.plain, self.master, *self.slots)

    def arithmetic(self, name: str) -> str:
        """The dtype that a tensor is averaged in."""
        return "float64" if self.float64 or self.base[name].dtype == "F64" else "float32"

    def as_stored(self, name: str) -> bool:
        """Whether compiled code works on all updates of a tensor, and nothing else looks at their values."""
        compiled = native.library() is not None and self.arithmetic(name) == "float32"
        return compiled and self.values is None and all(one[name].dtype in native.KINDS for one in self.plain)


@dataclass(kw_only=True)
class Passed:
    """What a pass found out."""

    gram: Array
    """Inner products of the updates' steps, (updates, updates), float64."""
    by_tensor: dict[str, Array] = field(default_factory=dict)
    """Inner products of the steps by tensor, where they are asked for."""
    along_momentum: dict[str, Array] = field(default_factory=dict)
    """Inner products of each update's step, and last of the momentum itself, with the momentum, by tensor."""
    step_squared: float = 0.0
    """Squared L2 norm of the master's change."""
    elements: int = 0
    counted: int = 0
    """Elements behind `gram` and `step_squared`."""
    bytes_read: int = 0
    bytes_written: int = 0


class NotFinite(InputError):
    """A value of the next model, or of its optimizer's state, is NaN or infinity, or does not fit its dtype; `update`
    says whose fault it is."""

    def __init__(self, name: str, dtype: str, update: int | None) -> None:
        self.name, self.dtype, self.update = name, dtype, update
        super().__init__(
            f"tensor {name!r} of the next model, or of its optimizer's state, holds NaN or infinity, or does not fit "
            f"{dtype}: an update diverged, or the server learning rate is too large"
        )


class Malformed(InputError):
    """A message holds what no encoder writes; `update` says whose."""

    def __init__(self, update: int, reason: str) -> None:
        self.update = update
        super().__init__(reason)
