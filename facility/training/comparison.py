"""Several models on this facility's validation data, block by block: a round that takes no step.

The ranks are laid out and the model is built once; each model's weights are then put into it. Losses of single blocks
stay in the state directory, as what later models are compared with; figures with bootstrap intervals leave it.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from facility.dataset import NAME, open_dataset
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import ConfigurationError
from facility.exchange.files.durable import write_json
from facility.exchange.files.paths import resolve_path
from facility.exchange.json_values import note_in
from facility.exchange.messages.comparison import (
    GLOBAL,
    INITIAL,
    Figure,
    folders_of,
    with_figures,
    with_missing,
    with_tasks,
)
from facility.exchange.messages.evaluation import ACCURACY, HELD_OUT, VALIDATION
from facility.exchange.messages.manifest import Manifest, read_manifest, sha256_of
from facility.exchange.messages.plausible import MOST_LOSS
from facility.training.bootstrap import BlockLosses, loss_difference, mean_loss_interval
from facility.training.data.loader import DataLoader
from facility.training.finish import write_evaluation
from facility.training.prepare import load_weights
from facility.training.processes.ranks import agree_on_failure
from facility.training.request import RoundRequest
from facility.training.round import Round

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Data:
    """One data set to evaluate on."""

    loader: DataLoader
    held_out: bool
    digest: str
    """Of the dataset's manifest, and of how many blocks of it are read."""


@dataclass
class Found:
    """What leaves the facility."""

    figures: list[Figure] = field(default_factory=list)
    scores: list[dict[str, Any]] = field(default_factory=list)
    """Accuracies, where models classify."""
    missing: dict[str, str] = field(default_factory=dict)
    """Models without figures, and why."""


def compare_models(round: Round) -> Found:
    """Evaluate every model of the received directory; what was found, on the first rank."""
    request = round.request
    assert request.bundle is not None
    manifest, sets = read_manifest(request.bundle), data_sets(round)
    kept = KeptLosses(request.state / "comparison", read_manifest(request.bundle / GLOBAL).content_sha256)
    found = Found()
    for folder, model in models_of(request, manifest).items():
        checkpoint = open_checkpoint(model)
        with agree_on_failure(round.ranks):
            load_weights(round.engine.assembly, round.inputs, checkpoint, request.settings.seed)
        for data in sets:
            round.show("evaluating")  # a sign of life: with many models, or many blocks, all of them take hours
            losses, predictions = round.engine.evaluate_blocks(data.loader.blocks(), data.loader.evaluated)
            one = BlockLosses(losses=losses, predictions=predictions)
            if not round.ranks.first:
                continue
            where = " on held-out data" if data.held_out else ""
            measured = figure(folder, data, one, kept.others(data.digest, folder))
            if reason := unbelievable(measured):  # of one model: the others' figures are none the worse
                log.warning("%s%s has no figures: %s", folder, where, reason)
                found.missing[folder] = f"{reason}{where}"
                continue
            if folder in (GLOBAL, INITIAL):
                kept.keep(data.digest, folder, one)
            found.figures.append(measured)
            if round.engine.accuracy is not None:
                found.scores.append(accuracy_score(folder, data, round.engine.accuracy, int(one.predictions.sum())))
            log.info("%s%s: %s", folder, where, round.words.of_loss(one.mean))
    return found


def unbelievable(measured: Figure) -> str:
    """Why no message can give a model's loss; '' where one can."""
    if 0 <= measured.loss.value and measured.loss.high <= MOST_LOSS:
        return ""
    return f"its loss is {measured.loss.value:g} (up to {measured.loss.high:g}), expected a number up to {MOST_LOSS:g}"


def models_of(request: RoundRequest, manifest: Manifest) -> dict[str, Path]:
    """Every model to evaluate, by name: those received, then the facility's own, which stay there."""
    assert request.bundle is not None
    own = sorted(request.own_models.iterdir()) if request.own_models is not None else []
    return {name: request.bundle / name for name in folders_of(manifest)} | {path.name: path for path in own}


def accuracy_score(folder: str, data: Data, accuracy: float, predictions: int) -> dict[str, Any]:
    """The accuracy of one model on one data set, with the standard error of a share of `predictions`."""
    task = HELD_OUT if data.held_out else VALIDATION
    stderr = math.sqrt(accuracy * (1 - accuracy) / predictions)
    return {"model": folder, "task": task, "metric": ACCURACY, "value": accuracy, "stderr": stderr}


def figure(folder: str, data: Data, one: BlockLosses, others: dict[str, BlockLosses]) -> Figure:
    """What leaves the facility of one model on one data set."""
    alike = {name: other for name, other in others.items() if len(other.losses) == len(one.losses)}
    return Figure(
        model=folder,
        held_out=data.held_out,
        loss=mean_loss_interval(one),
        blocks=len(one.losses),
        predictions=int(one.predictions.sum()),
        against={name: loss_difference(one, other) for name, other in alike.items()},
    )


def data_sets(round: Round) -> list[Data]:
    """The facility's own validation data, and the held-out data, where the settings name some."""
    setup, request = round.setup, round.request
    own = request.dataset
    found = [Data(loader=setup.loader, held_out=False, digest=digest_of(own, setup.loader.evaluated))]
    if not request.settings.evaluation.held_out:
        return found
    directory = resolve_path(request.settings.evaluation.held_out)
    with agree_on_failure(round.ranks):
        dataset = open_dataset(directory)
        mine, theirs = round.inputs.dataset.manifest, dataset.manifest
        for key in ("task", "block_tokens", "documents", "tokenizer_sha256", "pixels", "classes"):
            if getattr(mine, key) != getattr(theirs, key):
                raise ConfigurationError(
                    f"the held-out dataset {directory} has {key} {getattr(theirs, key)!r}, that of the facility has "
                    f"{getattr(mine, key)!r}: prepare it as that one was prepared"
                )
        loader = setup.loader.over(dataset)
    return [*found, Data(loader=loader, held_out=True, digest=digest_of(directory, loader.evaluated))]


def digest_of(dataset: Path, blocks: int) -> str:
    """What losses of single blocks belong to."""
    return f"{sha256_of(dataset / NAME)[:32]}-even-{blocks}"


class KeptLosses:
    """Block losses of the global and the initial model, for models that arrive in a later job."""

    def __init__(self, directory: Path, final: str) -> None:
        """`final`: digest of the global model that all of it belongs to."""
        self.directory = directory / final[:32]

    def keep(self, digest: str, folder: str, one: BlockLosses) -> None:
        """Remember one model's losses; those that belong to another global model are forgotten."""
        for other in self.directory.parent.glob("*"):
            if other != self.directory:
                shutil.rmtree(other)
        self.directory.mkdir(parents=True, exist_ok=True)
        content = {"losses": one.losses.tolist(), "predictions": one.predictions.tolist()}
        write_json(self.directory / f"{folder}-{digest}.json", content)

    def others(self, digest: str, folder: str) -> dict[str, BlockLosses]:
        """Block losses of the models that `folder` is compared with, where they were evaluated on the same data."""
        found = {}
        for name in (GLOBAL, INITIAL):
            content = note_in(self.directory / f"{name}-{digest}.json")
            if content is not None and name != folder:
                losses, predictions = np.array(content["losses"]), np.array(content["predictions"], dtype=np.int64)
                found[name] = BlockLosses(losses=losses, predictions=predictions)
        return found


def finish_comparison(round: Round, found: Found) -> None:
    """Write the figures as an update without weights."""

    def add(directory: Path) -> None:
        with_figures(directory, found.figures)
        if found.scores:
            with_tasks(directory, found.scores)
        if found.missing:
            with_missing(directory, found.missing)

    assert round.request.bundle is not None
    write_evaluation(round, read_manifest(round.request.bundle), time.perf_counter() - round.times.loaded, add=add)
