"""What an aggregation is asked for."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coordinator.aggregation.settings import AggregationSettings
from coordinator.aggregation.unmasking import Unmasking
from facility.exchange.messages.layout import LoraSettings


@dataclass(frozen=True, kw_only=True)
class Request:
    """The inputs, outputs and settings of one aggregation."""

    base: Path
    """The model that was sent."""
    updates: Mapping[str, Path] | Sequence[Path]
    """Directories, by facility where the caller knows it."""
    out: Path
    """The next model, a Hugging Face checkpoint in the base's dtypes."""
    settings: AggregationSettings
    verify_base: bool = False
    """Compare the base with its manifest as it is read; otherwise it is taken as it is."""
    verify_updates: bool = False
    """Compare the updates, whose content nobody has looked at, with their manifests. `DamagedUpdate` is then raised
    also with `drop_refused`: the facility may send it again."""
    state_in: Path | None = None
    """State of the round before; None: it begins from the base."""
    state_out: Path | None = None
    """Float32 master and the server optimizer's tensors; None: none is written."""
    record: Path | None = None
    """Path of round.json; None: in `state_out`, else beside `out` as `<out>.round.json`. Never in the model, which is
    sent to every facility."""
    threads: int = 0
    """0: automatic."""
    adapters: LoraSettings | None = None
    """What the facilities were asked to train; None: not known, the base model and the majority decide."""
    seed: int | None = None
    """The federation's, from which facilities draw the first adapters; None: not known."""
    unmasking: Unmasking | None = None
    """What takes the masks off; None: the updates are not masked."""
    drop_refused: bool = False
    """Go on without an update that is refused, instead of raising."""
    work: Mapping[str, float] | None = None
    """What each facility did in the round, in any unit, where that is not the same for all (`rounds.steps`)."""
    facilities: Collection[str] | None = None
    """All of the federation, whoever delivered in this round; None: not known."""
    rated: Callable[[AggregationSettings, Collection[str]], AggregationSettings] | None = None
    """The settings with the server learning rate of a round in which these facilities' updates are left out: it may
    depend on who is averaged. None: the settings' own."""
    minimum_updates: int = 1
    """Fewer left than this is an error."""
