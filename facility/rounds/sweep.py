"""Which models and updates a facility no longer needs: those of rounds before the previous one."""

from __future__ import annotations

from pathlib import Path

from facility.exchange.files.sweep import sweep_engine_directories
from facility.exchange.messages.manifest import manifest_if_any
from facility.exchange.messages.settings import FacilitySettings


def sweep(job_directory: Path, settings: FacilitySettings, round: int) -> list[Path]:
    """Remove this federation's models and updates of rounds before `round` - 1 beside `job_directory`; returns them."""

    def is_over(directory: Path) -> bool:
        if (manifest := manifest_if_any(directory)) is None:
            return False
        to_everybody = manifest.kind == "model" and manifest.facility is None
        mine = to_everybody or manifest.facility == settings.facility
        return mine and manifest.federation == settings.federation and manifest.round < round - 1

    return sweep_engine_directories(job_directory, is_over)
