"""What one round is asked to do: the command line and the settings file, read."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from facility.exchange.checkpoints.patterns import Patterns
from facility.exchange.delta_codecs import trained_from
from facility.exchange.files.paths import resolve_path
from facility.exchange.messages.comparison import GLOBAL, MODELS
from facility.exchange.messages.manifest import manifest_if_any
from facility.exchange.messages.plan import Plan, read_plan
from facility.exchange.messages.privacy import check_layout
from facility.exchange.messages.settings import FacilitySettings, TrainingSettings, read_facility_settings
from facility.rounds.kept import state_directory

if TYPE_CHECKING:
    from facility.rounds.masked import Masked


@dataclass(frozen=True, kw_only=True)
class RoundRequest:
    """One round of one facility."""

    settings: FacilitySettings
    round: int
    """From 0; one past the last asks for the evaluation of the final model."""
    model: Path
    """The received checkpoint."""
    dataset: Path
    out: Path
    """The update; must not exist."""
    job_directory: Path
    """Directory that `progress.json` is written to."""
    state: Path
    """What this facility keeps between rounds."""
    unsent: Path | None
    """What earlier updates left out; None: nothing."""
    unsent_out: Path | None = None
    """Where to leave what this update leaves out, if it is written as a message; None: it is written whole."""
    left: Path | None = None
    """What the message adds to its difference, of an encoding that fades; None: nothing."""
    masks: Masked | None = None
    """How the update is masked as it is written; None: it is not."""
    plan: Plan | None
    """The layout by a planner; None: by the settings."""
    asked_steps: int | None = None
    """Optimizer steps that the coordinator asks for in this round; None: those of the settings."""
    every_step: bool
    """Log each step, not one a second at most."""
    began: float
    """Start of the process (time.perf_counter), seconds."""
    bundle: Path | None = None
    """A directory of several models to compare, of which `model` is the global one."""
    own_models: Path | None = None
    """A directory of further ones, a folder each, which are this facility's alone; None: none."""

    @property
    def name(self) -> str:
        """Facility and round, for log lines."""
        return f"{self.settings.facility} round {self.round}"

    @cached_property
    def training(self) -> TrainingSettings:
        """With the steps of this round."""
        training = self.settings.training
        return training if self.asked_steps is None else replace(training, steps=self.asked_steps)

    @property
    def federated(self) -> Patterns:
        """Which tensors leave the facility."""
        return Patterns(tuple(self.settings.include), tuple(self.settings.exclude))

    @property
    def unsent_share(self) -> float:
        """Share of what earlier updates left out that this round is trained from; the rest is only sent."""
        training = self.training
        return trained_from(training.encoding, training.unsent_share) if self.unsent is not None else 0.0

    @property
    def evaluates_only(self) -> bool:
        """True if the round takes no step."""
        return self.round == self.settings.rounds

    @property
    def base_model(self) -> Path:
        """The checkpoint that configuration and weights come from: the received one, or a base that never travels."""
        return resolve_path(self.training.lora.base) if self.training.lora.base else self.model

    @property
    def total_steps(self) -> int:
        """Optimizer steps of all rounds together, by the settings: what the learning rate's schedule spans."""
        return self.settings.rounds * self.settings.training.steps


def read_request(arguments: argparse.Namespace, began: float) -> RoundRequest:
    """Read the settings and the plan that the command line names. Raises `ConfigurationError`."""
    settings = read_facility_settings(arguments.settings)
    planned = settings.training.layout.plan
    plan = arguments.plan or (resolve_path(planned) if planned else None)
    if plan and settings.differential is not None:
        check_layout(replace(settings.training.layout, plan=str(plan)))
    manifest = manifest_if_any(arguments.model)
    state = state_directory(arguments.state, settings, arguments.dataset)
    bundle = arguments.model if manifest is not None and manifest.kind == MODELS else None
    return RoundRequest(
        settings=settings,
        round=arguments.round,
        model=arguments.model / GLOBAL if bundle else arguments.model,
        dataset=arguments.dataset,
        out=arguments.out,
        job_directory=arguments.job_directory or arguments.out.absolute().parent,
        state=state,
        unsent=arguments.unsent,
        unsent_out=arguments.unsent_out,
        left=arguments.left,
        masks=masks_of(arguments, settings, state),
        plan=read_plan(plan) if plan else None,
        asked_steps=arguments.steps,
        every_step=arguments.progress,
        began=began,
        bundle=bundle,
        own_models=arguments.own_models if bundle else None,
    )


def masks_of(arguments: argparse.Namespace, settings: FacilitySettings, state: Path) -> Masked | None:
    """How one rank alone masks its update. Raises `InputError`, before anything is trained, as `facility.round` does:
    the roster lies where the coordinator can write, and may have been changed since."""
    if arguments.roster is None or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return None
    from facility.rounds.masked import read_masking  # and with it ciphers, which a round without masks does not need

    return read_masking(settings, state, arguments.roster, arguments.model, arguments.round, dataset=arguments.dataset)
