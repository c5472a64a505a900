"""Where the content of updates is verified and decoded: as they arrive, or as they are averaged."""

from __future__ import annotations

from coordinator.config.evaluation import ComparisonSettings
from coordinator.config.federation import Federation
from coordinator.config.settings import CoordinatorSettings


def verified_as_averaged(settings: CoordinatorSettings) -> bool:
    """Whether the pass that averages updates makes their digests and looks for values that are not finite.

    Then an update is not read for that as it arrives. A round that closes before all have answered counts what is
    sound, so it must know at once; sums under masks have no finite values to look for.
    """
    return settings.masks is None and settings.closing is None


def averaged_as_encoded(settings: CoordinatorSettings) -> bool:
    """Whether the pass that averages decodes updates that travelled as differences, block by block from their messages.

    Else the receive step writes each decoded: where its content must be known at once, and where it is kept to be
    compared with others after the last round.
    """
    adapters = settings.lora is not None and settings.lora.rank > 0
    return verified_as_averaged(settings) and not adapters and not _keeps_updates(settings.comparison)


def averages_encoded(federation: Federation) -> bool:
    """Whether the averaging pass of a federation, as described, decodes updates from their messages."""
    comparison = federation.evaluation.comparison(masked=bool(federation.masks))
    return federation.closing is None and not federation.masks and not _keeps_updates(comparison)


def _keeps_updates(comparison: ComparisonSettings | None) -> bool:
    return comparison is not None and comparison.updates
