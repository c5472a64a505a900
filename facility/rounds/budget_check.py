"""Did the module that trained keep the privacy budget that the settings state? Another one may know nothing of it."""

from __future__ import annotations

from pathlib import Path

from facility.exchange.errors import InputError
from facility.exchange.messages.privacy import privacy_of
from facility.exchange.messages.report import read_report
from facility.exchange.messages.settings import FacilitySettings


def check_budget(update: Path, settings: FacilitySettings, round: int, *, module: str) -> None:
    """Raise `InputError` where differential privacy is asked for and the update's report does not say it was kept."""
    asked = settings.differential
    if asked is None or round >= settings.rounds:
        return
    reported = privacy_of(read_report(update).details)
    if reported is None or reported.unit != asked.unit or not reported.spent <= reported.epsilon <= asked.epsilon:
        raise InputError(
            f"the settings ask for differential privacy with epsilon {asked.epsilon:g}, but {module} does not report "
            "that it kept it, so nothing leaves: train with facility.train"
        )
