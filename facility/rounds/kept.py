"""Where a facility keeps what outlives a round: optimizer state, finished updates, personal tensors."""

from __future__ import annotations

import os
from pathlib import Path

from facility.exchange.settings import FacilitySettings


def default_directory(settings: FacilitySettings, dataset: Path) -> Path:
    """$CROSSFED_STATE/<federation>/<facility>, or `.crossfed/<federation>/<facility>` beside the dataset."""
    root = os.environ.get("CROSSFED_STATE")
    base = Path(root) if root else Path(dataset).absolute().parent / ".crossfed"
    return base / settings.federation / settings.facility
