"""What the coordinator expects of one facility's update in one round, all of it known before the update arrives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from coordinator.aggregation.settings import AggregationSettings
from coordinator.archive.rounds import Archive
from coordinator.config.privacy import PrivacySettings
from coordinator.rounds.weight_limit import WeightLimit
from facility.exchange.checkpoints.checkpoint import Checkpoint, open_checkpoint
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.errors import UpdateRefused
from facility.exchange.messages.comparison import ALONE, GLOBAL, MODELS
from facility.exchange.messages.layout import LoraSettings
from facility.exchange.messages.manifest import Manifest, read_manifest
from facility.exchange.messages.masking import MaskedMoments


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """What the archive knows of the rounds before, for updates that come late."""

    archive: Archive
    facility: str
    seed: int = 0
    """Of the federation, from which adapters begin that no model held before."""

    def model(self, round: int) -> Path:
        """The model that round `round` started from. Raises `UpdateRefused` where it is gone."""
        path = self.archive.model_for(round)
        if not path.is_dir():
            reason = f"it is of round {round}, and the model of that round is no longer in the archive (keep_rounds)"
            raise UpdateRefused(self.facility, reason)
        return path

    def averaged(self) -> set[int]:
        """Rounds whose update of this facility was averaged, whenever that was."""
        rows = [row for entry in self.archive.history() for row in entry.facilities]
        return {row.round - row.staleness for row in rows if row.facility == self.facility and row.status == "ok"}

    def started(self, manifest: Manifest) -> Path:
        """The model that a late update started from. Raises `UpdateRefused` where that update was averaged already."""
        started = self.model(manifest.round)
        if manifest.round in self.averaged():
            raise UpdateRefused(self.facility, f"its update of round {manifest.round} was averaged already")
        if manifest.base_sha256 not in (None, read_manifest(started).content_sha256):
            raise UpdateRefused(self.facility, f"it started from another model than that of round {manifest.round}")
        return started


@dataclass(frozen=True, kw_only=True)
class Sent:
    """The model that the facilities were sent."""

    manifest: Manifest
    checkpoint: Checkpoint
    directory: Path


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What one facility's answer in one round must be; nothing in it comes from the facility."""

    facility: str
    round: int
    """From 0; the number of rounds for the final evaluation."""
    model: Path
    """The directory that was sent: a model, or several to be compared."""
    evaluation: bool
    """True for the final evaluation: figures are expected, and no weights."""
    settings: AggregationSettings
    weight_limit: WeightLimit | None = None
    """The most that its report may claim; None: any claim is taken here and capped later."""
    masks: PrivacySettings | None = None
    """The update must be masked as these settings say; None: it must not be masked."""
    moments: MaskedMoments | None = None
    """How the second moments of a masked update are masked; None: it must hold none."""
    adapters: LoraSettings | None = None
    """The adapters that a masked update, or an answer of several models, must hold; None: whole models."""
    earlier: Earlier | None = None
    """Needed for late updates and for training alone; None: neither is expected."""
    content: bool = True
    """Look at the values of its tensors; False: the averaging pass does."""
    encoded: bool = False
    """An update of this round that travels as a difference is averaged from its message; False: it is decoded first."""

    @property
    def patterns(self) -> Patterns:
        """Which tensors are federated, and which are personal."""
        return self.settings.federated

    def sent(self) -> Sent:
        """The manifest and the checkpoint of what was sent: of several models, the global one."""
        manifest = read_manifest(self.model)
        shown = {MODELS: self.model / GLOBAL}.get(manifest.kind, self.model)
        if manifest.kind == ALONE:
            assert self.earlier is not None, "the initial model is in the archive"
            shown = self.earlier.archive.model_for(0)
        return Sent(manifest=manifest, checkpoint=open_checkpoint(shown), directory=shown)
