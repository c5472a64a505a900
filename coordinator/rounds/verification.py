"""Where the content of updates is verified: as they arrive, or as they are averaged."""

from __future__ import annotations

from coordinator.config.settings import CoordinatorSettings


def verified_as_averaged(settings: CoordinatorSettings) -> bool:
    """Whether the pass that averages updates makes their digests and looks for values that are not finite.

    Then an update is not read for that as it arrives. A round that closes before all have answered counts what is
    sound, so it must know at once; sums under masks have no finite values to look for.
    """
    return settings.masks is None and settings.closing is None
