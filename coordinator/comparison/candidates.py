"""Candidates for the final model beside the newest global one, and which the facilities' validation data choose."""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from coordinator.archive.averaged import FOLDER
from coordinator.archive.rounds import Archive
from coordinator.comparison.account import Account
from coordinator.comparison.averaging import average
from coordinator.config.evaluation import ComparisonSettings
from facility.exchange.messages.comparison import GLOBAL, LAST_OF

log = logging.getLogger(__name__)


def candidates(archive: Archive, wanted: ComparisonSettings) -> list[str]:
    """Folders of the candidates: none where the archive no longer holds the models that they are the mean of."""
    count, rounds = wanted.last_models, archive.rounds()
    if not count or len(rounds) < count or not all(path.is_dir() for path in _last_models(archive, count).values()):
        return []
    return [f"{LAST_OF}{count}"]


def candidate(archive: Archive, folder: str) -> Path:
    """The directory of a candidate, which is made where it is not there yet."""
    target = archive.compared / folder
    if not target.is_dir():
        models = _last_models(archive, int(folder.removeprefix(LAST_OF)))
        target.parent.mkdir(exist_ok=True)
        average(list(models.values()), target, list(models))
    return target


def choose(archive: Archive, wanted: ComparisonSettings, account: Account) -> Account:
    """The account with what the facilities' figures choose; the chosen candidate outlives the comparison."""
    for folder in candidates(archive, wanted):
        gains = gains_of(folder, account.figures)
        gain, better = (fmean(gains) if gains else None), is_better(gains)
        if better:
            target = archive.path / FOLDER
            made = candidate(archive, folder)  # made again where a stop came between this move and the account
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            made.rename(target / "model")
        account = dataclasses.replace(account, chosen=folder if better else "", gain=gain)
        log.info(last_models_sentence(account, wanted.last_models))
    return account


def gains_of(folder: str, figures: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[float]:
    """Loss of the global model less that of a candidate, of each facility that evaluated both; nats per token.

    Each counts the same, as in the guard: what a facility says of its number of predictions is its own word.
    """
    differences = []
    for own in figures.values():
        losses = {one["model"]: one["loss"]["value"] for one in own if not one["held_out"]}
        if folder in losses and GLOBAL in losses:
            differences.append(losses[GLOBAL] - losses[folder])
    return differences


def is_better(gains: Sequence[float]) -> bool:
    """Whether the mean gain is above 0, and stays so without any one of several facilities: the report of a single one
    makes no other model the final one, as it ends no federation (`coordinator.steps.decide`)."""
    if not gains or not fmean(gains) > 0:
        return False
    others = [[*gains[:number], *gains[number + 1 :]] for number in range(len(gains))]
    return all(fmean(rest) > 0 for rest in others if rest)


def last_models_sentence(account: Account, count: int) -> str:
    """What came of the mean of the last models; empty where it was not evaluated."""
    if account.gain is None:
        return ""
    how = "lower" if account.gain > 0 else "not lower"
    which = "it is the final model" if account.chosen else "the final model is the global one"
    if account.gain > 0 and not account.chosen:
        which += ", since that hangs on one facility's figures alone"
    return (
        f"The mean of the last {count} models: validation loss {how} than the global model's "
        f"({0 - account.gain:+.4f} nats per token, mean over facilities): {which}."
    )


def _last_models(archive: Archive, count: int) -> dict[int, Path]:
    """By round, the models that the last rounds made."""
    rounds = archive.rounds()[-count:]
    return {number: archive.model_for(number + 1) for number in rounds}
