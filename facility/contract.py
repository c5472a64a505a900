"""The contract of `facility.train` for a trainer of one's own: read a round, report its steps, deliver its update.

    call = read_call()                      # arguments, settings, the received model's manifest: read and verified
    for step in range(call.steps): ...      # call.report_step(step, loss); call.interrupted after such a signal
    call.deliver(model.save_pretrained, loss_received=..., loss_returned=..., training_loss=...)

A trainer may as well read and write these files itself; `python -m facility.conformance` tries what is left.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.step_norms import StepNorms
from facility.exchange.errors import InputError
from facility.exchange.files.durable import new_directory
from facility.exchange.messages import report
from facility.exchange.messages.manifest import Manifest, verify_manifest, write_manifest
from facility.exchange.messages.outcome import ENDING
from facility.exchange.messages.progress import JobProgress, ProgressFile
from facility.exchange.messages.settings import FacilitySettings, TrainingSettings, read_facility_settings
from facility.exchange.perplexity import perplexity
from facility.exchange.task_words import Task


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call of a trainer: what it is given, and how it answers."""

    model: Path
    """The received Hugging Face checkpoint."""
    base: Manifest
    """The received model's manifest, every file verified."""
    dataset: Path
    """What `facility.prepare` wrote (`facility.dataset.open_dataset`), or whatever else this trainer reads."""
    settings: FacilitySettings
    round: int
    out: Path
    state: Path
    """What this facility keeps between the rounds of this federation; it need not exist yet."""
    signals: list[int]
    """Signals that have asked this process to end."""
    began: float = field(default_factory=time.monotonic)
    """When the call was read, on this process's monotonic clock."""
    stepped: list[float] = field(default_factory=list)
    """When each step was reported, on the same clock."""
    shown: ProgressFile = field(default_factory=lambda: ProgressFile(Path()))
    """`progress.json` in the working directory."""

    @property
    def training(self) -> TrainingSettings:
        return self.settings.training

    @property
    def steps(self) -> int:
        """Optimizer steps of this round; 0 where the final model is to be evaluated."""
        return self.training.steps if self.round < self.settings.rounds else 0

    @property
    def first_rank(self) -> bool:
        """True in the one process that reports and delivers."""
        return os.environ.get("RANK", "0") == "0"

    @property
    def interrupted(self) -> bool:
        """True once the job is about to end: save and exit with 85, or go on and risk the round."""
        return bool(self.signals)

    def report_step(self, step: int, loss: float) -> None:
        """Replace `progress.json` after step number `step`, from 1, and print the step; a loss may be NaN."""
        self.stepped.append(time.monotonic())
        if self.first_rank:
            loss = float(loss)
            print(f"step {step}/{self.steps}: loss {loss:.4f}", flush=True)
            finite = loss if math.isfinite(loss) else None
            message = JobProgress(step=step, steps=self.steps, loss=finite, time=round(time.time(), 3))
            self.shown.write(message)

    def deliver(
        self,
        save: Callable[[Path], object],
        *,
        tokens: int,
        loss_received: float,
        loss_returned: float,
        training_loss: float,
        task: Task | Literal["own"] = "own",
    ) -> None:
        """Make the update of the first rank: weights by `save(directory)` (not for an evaluation), report, manifest.

        `tokens`: trained on in this round, by which the update is weighted. `task`: what the losses are of, as
        `facility.prepare` names it, so that tables show perplexities of text and images of images.
        """
        if not self.first_rank:
            return
        ready = time.monotonic()
        with new_directory(self.out) as out:
            if self.steps:
                save(out)
                if self.settings.norms_of_whole:
                    self._state_norms(out)
            report.write(
                out,
                report.Report(
                    federation=self.settings.federation,
                    facility=self.settings.facility,
                    round=self.round,
                    samples=self.steps * self.training.batch_sequences,
                    tokens=tokens if self.steps else 0,
                    steps=self.steps,
                    loss_received=loss_received,
                    loss_returned=loss_returned,
                    training_loss=training_loss,
                    perplexity_received=perplexity(loss_received),
                    perplexity_returned=perplexity(loss_returned),
                    seconds=self._seconds(ready),
                    tokens_per_second=self._speed(tokens),
                    details={report.TASK: task},
                ),
            )
            manifest = Manifest(
                kind="update",
                federation=self.settings.federation,
                facility=self.settings.facility,
                round=self.round,
                base_sha256=self.base.content_sha256,
            )
            write_manifest(out, manifest)

    def _seconds(self, ready: float) -> report.Seconds:
        """Wall time since the call: what precedes the first step, the steps, what follows them, and saving.

        Without two reported steps all that is not saving counts as training, or as evaluation where nothing is trained.
        """
        save = time.monotonic() - ready
        if not self.steps:
            return report.Seconds(evaluate=ready - self.began, save=save)
        if len(self.stepped) < 2:
            return report.Seconds(train=ready - self.began, save=save)
        one = (self.stepped[-1] - self.stepped[0]) / (len(self.stepped) - 1)
        first = max(self.began, self.stepped[0] - one)
        return report.Seconds(
            load=first - self.began,
            train=self.stepped[-1] - first,
            evaluate=ready - self.stepped[-1],
            save=save,
        )

    def _speed(self, tokens: int) -> float:
        """Tokens a second between the first and the last step that were reported; 0: not known."""
        if not self.steps or len(self.stepped) < 2 or self.stepped[-1] <= self.stepped[0]:
            return 0.0
        return tokens / self.steps * (len(self.stepped) - 1) / (self.stepped[-1] - self.stepped[0])

    def _state_norms(self, out: Path) -> None:
        """State the norm of the step, which saves the coordinator a reading of every update."""
        with StepNorms(open_checkpoint(self.model)) as norms:
            norms.read(open_checkpoint(out))
            norms.write(out)


def read_call(arguments: Sequence[str] | None = None) -> Call:
    """Read the command line (default: this process's), and note the scheduler's signals from here on.

    Raises `InputError` or `ManifestError` for a model that is not as it was sent.
    """
    parser = argparse.ArgumentParser(description="A trainer of one's own, called as facility.train is.")
    for name in ("model", "dataset", "settings", "out", "state"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--round", type=int, required=True)
    parser.add_argument("--progress", action="store_true")
    given = parser.parse_args(arguments)
    if given.out.exists():
        raise InputError(f"--out {given.out} exists already; remove it or choose another name")
    signals: list[int] = []
    for number in ENDING:
        signal.signal(number, lambda number, frame: signals.append(number))
    return Call(
        model=given.model,
        base=verify_manifest(given.model),
        dataset=given.dataset,
        settings=read_facility_settings(given.settings),
        round=given.round,
        out=given.out,
        state=given.state,
        signals=signals,
    )
