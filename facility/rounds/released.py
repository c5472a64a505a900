"""Does the ledger still hold all that was released? A copy restored from a backup has forgotten the newest steps.

Two others remember how many there were: the coordinator, by the reports that reached it, says so in each round's model;
and the dataset's account (`facility.rounds.dataset_budget`), which lies beside the state directories of federations.
"""

from __future__ import annotations

from pathlib import Path

from facility.exchange.errors import InputError
from facility.exchange.messages.manifest import Manifest
from facility.exchange.messages.privacy import steps_reported
from facility.exchange.messages.settings import FacilitySettings
from facility.rounds.privacy_ledger import ReleaseLedger, ledger_path


def steps_released(state: Path) -> int:
    """Noised steps in the ledger. Raises `InputError` where it is damaged."""
    return ReleaseLedger(state=state).count("training")


def check_remembered(received: Manifest, settings: FacilitySettings, state: Path) -> None:
    """Raise `InputError` where the coordinator has reports of more noised steps than the ledger holds."""
    if settings.differential is not None:
        check_count(
            state, steps_reported(received, settings.facility), "this facility's own reports to the coordinator"
        )


def check_count(state: Path, counted: int, source: str) -> None:
    """Raise `InputError` where the ledger holds fewer noised steps than the `counted` ones, which `source` counts."""
    if (found := steps_released(state)) < counted:
        raise InputError(
            f"{ledger_path(state)} holds {found:,} noised steps, and {source} count {counted:,}: it was removed, or "
            "restored from a backup. How much of the privacy budget is spent is not known, so nothing more is "
            "released; put back the file as it was last, or begin a federation of another name, whose budget adds to "
            "this one's"
        )
