"""The part of a model that stays at its facility: put in before training, taken out before the update travels.

`aggregation.include` and `aggregation.exclude` in federation.yml say which tensors are federated. The others are this
facility's own (a head, adapters, normalisation: Arivazhagan et al. 2019, FedPer, arXiv 1912.00818; Li et al. 2021,
FedBN, arXiv 2102.07623): they start from the initial model, live under the facility's state directory, and are in no
update.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from facility.exchange.checkpoints.checkpoint import Checkpoint, open_checkpoint, save_tensors
from facility.exchange.checkpoints.companions import copy_companions
from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.files.durable import new_directory
from facility.exchange.messages.manifest import read_manifest, store_manifest, write_manifest
from facility.rounds.kept import by_round, latest_before
from facility.rounds.sealed import write_seal

if TYPE_CHECKING:
    import torch


class Personal:
    """The personal tensors of one facility in one federation, by round."""

    def __init__(self, state: Path, patterns: Patterns) -> None:
        self.directory, self.patterns = Path(state) / "personal", patterns

    @property
    def any(self) -> bool:
        return self.patterns != Patterns()

    @property
    def model(self) -> Path:
        """Where `put_in` leaves the model to train."""
        return self.directory / "model"

    def kept(self, round: int) -> Checkpoint | None:
        """The facility's own tensors after the last round before `round`; None where there are none."""
        latest = latest_before(self.directory, round) if self.any else None
        found = None if latest is None else open_checkpoint(latest)
        return found if found is not None and found.tensors else None

    def put_in(self, received: Path, round: int) -> Path:
        """The received model with this facility's own tensors; `received` itself where there are none yet."""
        own = self.kept(round)
        if own is None:
            return received
        model = open_checkpoint(received)
        shutil.rmtree(self.model, ignore_errors=True)
        with new_directory(self.model) as temporary:
            copy_companions(received, temporary, leave=())
            save_tensors(temporary, _overlay(model, own))
            write_manifest(temporary, read_manifest(received))
        return self.model

    def take_out(self, update: Path, received: Path, round: int) -> None:
        """Keep the update's personal tensors here, and leave in the update only what is federated."""
        if not self.any:
            return
        trained = open_checkpoint(update)
        names = [name for name in trained.tensors if not self.patterns.federated(name)]
        shutil.rmtree(self.directory / f"round-{round}", ignore_errors=True)
        with new_directory(self.directory / f"round-{round}") as temporary:
            save_tensors(temporary, ((name, trained.read(name)) for name in names))
            write_seal(temporary)
        if names:
            self._leave_out(names, trained, update, received)
        else:  # of adapters, where the patterns are for the model beneath: they stay in a file of their own
            self.name_received(update, received)
        for number, old in by_round(self.directory).items():
            if number < round - 1 or number > round:  # later ones are of rounds that were set aside, or of another run
                shutil.rmtree(old, ignore_errors=True)

    def _leave_out(self, names: Collection[str], trained: Checkpoint, update: Path, received: Path) -> None:
        """Replace the update, opened as `trained`, by one without the tensors `names`."""
        slim = update.with_name(f".{update.name}.federated")
        shutil.rmtree(slim, ignore_errors=True)
        with new_directory(slim) as temporary:
            copy_companions(update, temporary, leave=())
            save_tensors(temporary, ((name, trained.read(name)) for name in trained.tensors if name not in names))
            remaining = open_checkpoint(temporary)
            write_manifest(
                temporary,
                dataclasses.replace(
                    read_manifest(update),
                    base_sha256=read_manifest(received).content_sha256,
                    dtypes=remaining.dtypes(),
                    parameters=remaining.parameters,
                ),
            )
        shutil.rmtree(update)
        slim.rename(update)

    def name_received(self, evaluated: Path, received: Path) -> None:
        """Let what was made of the model with this facility's own tensors say which model was received."""
        if self.any:
            manifest = dataclasses.replace(read_manifest(evaluated), base_sha256=read_manifest(received).content_sha256)
            store_manifest(evaluated, manifest)


def _overlay(model: Checkpoint, own: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for name in model.tensors:
        yield name, (own if name in own.tensors else model).read(name)
