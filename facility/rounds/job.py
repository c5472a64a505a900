"""One call of `facility.round`, and starting the ranks that do its work."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.delta_codecs import FULL
from facility.exchange.messages.comparison import ALONE, MODELS
from facility.exchange.messages.manifest import read_manifest
from facility.exchange.messages.settings import FacilitySettings
from facility.exchange.messages.trainer import BUILT_IN
from facility.launch import launch_ranks, limits_from
from facility.launching.notes import Notes
from facility.launching.place import Tasks
from facility.launching.supervise import Ending
from facility.rounds.energy import Meter
from facility.rounds.kept import compared_place
from facility.rounds.masked import unmasked_path
from facility.rounds.models import Models, digest_of
from facility.rounds.personal import Personal
from facility.rounds.smaller import pending_residual, residual_to_add, residual_to_resume
from facility.rounds.steps import steps_of

GO, DONE, FAILED = "train", "done", "failed"
"""What the first task writes for the others."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of this command."""

    arguments: argparse.Namespace
    settings: FacilitySettings
    tasks: Tasks
    notes: Notes
    meter: Meter
    state: Path
    """What this facility keeps between rounds of this federation."""
    dataset: Path

    @property
    def out(self) -> Path:
        return self.arguments.out

    @property
    def round(self) -> int:
        return self.arguments.round

    @property
    def goes_on_at(self) -> int:
        """The round before which what it goes on from was kept: where `rounds` was lowered below what is done, the
        final evaluation has a smaller number than the model that it evaluates."""
        return max(self.round, read_manifest(self.arguments.model).round)

    @property
    def masks(self) -> bool:
        """True if the update leaves masked."""
        return self.settings.masking is not None and self.round < self.settings.rounds

    @property
    def hides(self) -> bool:
        """True if the weights that this job trains stay out of its directory, which the coordinator reads."""
        return self.masks or self.settings.masking is not None and self.kind == ALONE

    @property
    def trained(self) -> Path:
        """Where training leaves the update: with masks not in the job's own directory, which the coordinator reads."""
        return unmasked_path(self.state, self.round) if self.masks else self.out

    @property
    def kind(self) -> str:
        """What was received: a `model`, several `models` to compare, or the order to train `alone`."""
        return read_manifest(self.arguments.model).kind

    @property
    def personal(self) -> Personal:
        return Personal(self.state, Patterns(tuple(self.settings.include), tuple(self.settings.exclude)))

    @property
    def built_in(self) -> bool:
        """True if the trainer is CrossFed's own."""
        return (self.arguments.module or self.settings.trainer.module) == BUILT_IN

    @property
    def writes_messages(self) -> bool:
        """True if the trainer may write its update as a message at once: CrossFed's own does, in a round that takes
        steps, where nothing is to be taken out of the update, or masked, before it is encoded."""
        encoding = self.settings.training.encoding
        encoded = encoding != FULL and self.round < self.settings.rounds
        return self.built_in and encoded and not self.personal.any and self.settings.masking is None

    @property
    def masks_from_memory(self) -> bool:
        """True if the trainer may mask its update as it writes it: CrossFed's own does, where nothing is taken out of
        the update before, and nobody needs it whole afterwards."""
        whole = self.personal.any or self.settings.evaluation.own_models or self.settings.norms_of_whole
        return self.masks and self.built_in and not whole and self.settings.training.encoding == FULL

    @property
    def keeps_models(self) -> bool:
        return self.settings.model_encoding != "full" and self.kind not in (MODELS, ALONE)

    @property
    def received(self) -> Path:
        """The received model, whole."""
        model = self.arguments.model
        return Models(self.state).place(digest_of(read_manifest(model))) if self.keeps_models else model

    @property
    def model(self) -> Path:
        """The model to train: as received, or with this facility's own tensors in it."""
        own = self.personal
        return self.received if own.kept(self.goes_on_at) is None else own.model


@dataclass(frozen=True, kw_only=True)
class Work:
    """What `facility.train` is started for."""

    model: Path
    settings: Path
    round: int
    out: Path
    state: Path
    unsent: Path | None = None
    """What earlier updates left out."""
    unsent_out: Path | None = None
    """Where the trainer leaves what its update leaves out; None: it writes the update whole."""
    left: Path | None = None
    """What it adds to the update's difference before."""
    roster: Path | None = None
    """Under which the trainer masks its update as it writes it; None: it does not."""
    steps: int | None = None
    """Steps that the coordinator asks for; None: those of the settings."""
    own_models: Path | None = None
    """Models of this facility's own that are compared beside those received; None: none."""


def work_of_round(job: Job) -> Work:
    """The round that the job was submitted for."""
    a = job.arguments
    masked = job.settings.masking is not None
    ahead = residual_to_resume(job.state, a.round, job.settings.training, masked=masked, built_in=job.built_in)
    trains = a.round < job.settings.rounds
    return Work(
        model=job.model,
        settings=a.settings,
        round=a.round,
        out=job.trained,
        state=job.state,
        unsent=ahead if trains else None,
        unsent_out=pending_residual(job.state) if job.writes_messages else None,
        left=residual_to_add(job.state, a.round, job.settings.training) if job.writes_messages else None,
        roster=a.roster if job.masks_from_memory else None,
        steps=steps_of(job.state, job.settings, read_manifest(a.model), a.round) if trains else None,
        own_models=found if job.kind == MODELS and (found := compared_place(job.state)).is_dir() else None,
    )


def start_ranks(job: Job, work: Work) -> Ending:
    """Start `facility.train`, or a module that keeps its contract, on this task's ranks and wait for their end."""
    training = job.settings.training
    options = {
        "model": work.model,
        "dataset": job.dataset,
        "settings": work.settings,
        "round": work.round,
        "out": work.out,
        "state": work.state,
    }
    command = ["-m", job.arguments.module or job.settings.trainer.module]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    command.append("--progress")
    if job.hides:
        command += ["--job-directory", str(Path.cwd())]
    if work.own_models is not None:
        command += ["--own-models", str(work.own_models)]
    if work.unsent is not None:
        command += ["--unsent", str(work.unsent)]
    if work.unsent_out is not None:
        command += ["--unsent-out", str(work.unsent_out)]
    if work.left is not None:
        command += ["--left", str(work.left)]
    if work.roster is not None:
        command += ["--roster", str(work.roster)]
    if work.steps is not None:
        command += ["--steps", str(work.steps)]
    return launch_ranks(
        command,
        tasks=job.tasks,
        ranks=training.ranks,
        use_devices=training.device != "cpu",
        limits=limits_from(job.arguments, job.tasks),
        notes=job.notes,
    )


def clear_attempt(out: Path) -> None:
    """Remove what an earlier attempt left at the update's place."""
    if out.is_symlink() or out.is_file():
        out.unlink()
    elif out.exists():
        shutil.rmtree(out)
