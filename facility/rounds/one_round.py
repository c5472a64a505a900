"""The stages of one facility's round, in the order in which `facility.round` runs them."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from facility.dataset import NAME as DATASET
from facility.exchange.errors import InputError, ManifestError
from facility.exchange.files.audit_log import AUDIT
from facility.exchange.files.links import link_tree
from facility.exchange.messages.comparison import ALONE, MODELS, folders_of, with_missing
from facility.exchange.messages.dataset_card import with_dataset
from facility.exchange.messages.manifest import NAME, read_manifest, run_of, verify_manifest, with_head, with_run
from facility.exchange.messages.outcome import Outcome
from facility.exchange.messages.report import read_report
from facility.exchange.messages.usage import with_usage
from facility.launch import limits_from
from facility.launching.supervise import Ending
from facility.rounds.alone import train_alone
from facility.rounds.budget_check import check_budget
from facility.rounds.dataset_check import check_dataset
from facility.rounds.dataset_counts import counts_of
from facility.rounds.evaluation import write_scores, write_scores_of_models
from facility.rounds.finished import Finished, key_of
from facility.rounds.held import drop_held
from facility.rounds.job import Job, clear_attempt, start_ranks, work_of_round
from facility.rounds.kept import compared_place
from facility.rounds.masked import Masked, read_masking
from facility.rounds.models import Models, digest_of, note_kept_model
from facility.rounds.own_models import gather_own_models, keep_own_update
from facility.rounds.sealed import check_kept
from facility.rounds.set_aside import forget_set_aside
from facility.rounds.signing import sign_update
from facility.rounds.smaller import drop_pending, make_smaller
from facility.rounds.steps import decide_steps, remember_beside
from facility.rounds.sweep import forget_earlier, note_job, remove_old_rounds, sweep_jobs

log = logging.getLogger(__name__)


class OneRound:
    """A round that the first task of a job works on. Raises `CrossFedError` from every stage."""

    def __init__(self, job: Job) -> None:
        received = read_manifest(job.arguments.model)
        if not os.path.isdir(job.dataset):
            raise InputError(
                f"the dataset {job.dataset} is not a directory here; expected what `python -m facility.prepare` writes"
            )
        self.job = job
        self.received = received
        """Manifest of what was received."""
        self.run = run_of(received)
        """Identifies the run that the model belongs to."""
        self.base = received.content_sha256 if received.kind in (MODELS, ALONE) else digest_of(received)
        """Digest of the received model, whole."""
        self.finished = Finished(job.state)
        self.key = key_of(f"{self.base} {self.run}".rstrip(), job.arguments.settings, job.dataset)
        """What the update depends on."""
        self.masks: Masked | None = None
        """How the update is masked; None: it is sent as it is."""
        self.missing: dict[str, str] = {}
        """Models of this facility's own that cannot be evaluated, and why."""
        self.decided: float | None = None
        """When this job decided how many steps it takes, in seconds since 1970; None: it did not."""

    def sweep(self) -> None:
        """Remove what jobs of earlier rounds left."""
        note_job(Path.cwd(), self.job.settings, self.job.round)
        for path in remove_old_rounds(Path.cwd(), self.job.settings, self.job.round, self.received):
            log.info("removed %s, of an earlier round", path)
        for path in sweep_jobs(Path.cwd(), self.job.settings, self.job.round, self.received):
            log.info("removed %s, the directory of an earlier job", path)

    def train_alone(self) -> Ending:
        """Train one round alone, to compare with, in place of all other stages."""
        job = self.job
        clear_attempt(job.out)
        ending = train_alone(job, self.received)
        if ending.code == Outcome.DONE:
            with_run(job.out, self.run)
            with_usage(job.out, job.meter.usage(job.notes))
            with_head(job.out, os.environ.get(AUDIT, ""))
            if job.settings.training.signing_key:
                sign_update(job.out, job.settings, job.settings.rounds)
        return ending

    def open(self) -> None:
        """Read the keys and the roster of secure aggregation."""
        job = self.job
        self.masks = read_masking(
            job.settings, job.state, job.arguments.roster, job.received, job.round, dataset=job.dataset
        )

    def finished_before(self) -> bool:
        """Hand over the update of an earlier job of this round; False where there is none."""
        job = self.job
        if (found := self.finished.find(self.key, job.round)) is None:
            return False
        if self.masks is not None and not self.masks.can_make(found):
            log.warning("%s was finished before, but what was masked of it is damaged: it is trained again", found)
            return False
        log.info("%s was finished before from the same model, settings and data: not trained again", found)
        forget_set_aside(job.state, self.received, done=job.round)
        clear_attempt(job.out)
        if self.masks is None:
            link_tree(found, job.out)
        else:
            self.mask(found)
        return True

    def prepare(self) -> None:
        """Make state, dataset and model ready to be trained from."""
        job = self.job
        self.finished.drop_before(job.round)
        clear_attempt(job.out)
        drop_pending(job.state)
        drop_held(job.state)
        for path in forget_set_aside(job.state, self.received):
            log.info("removed %s, of a round that crossfed rewind set aside", path)
        for warning in check_kept(job.state, job.goes_on_at, evaluates=job.round >= job.settings.rounds):
            log.warning(warning)
        if (job.dataset / DATASET).is_file():
            check_dataset(job.dataset, job.state)
        if job.keeps_models:
            Models(job.state).whole(job.arguments.model)
        job.personal.put_in(job.received, job.goes_on_at)
        if self.received.kind == MODELS:
            self.missing = gather_own_models(job.state, self.received, job.settings.facility)
        clear_attempt(job.trained)
        job.trained.parent.mkdir(parents=True, exist_ok=True)
        if job.round < job.settings.rounds:
            limit = limits_from(job.arguments, job.tasks).total
            self.decided = decide_steps(job.state, job.settings, self.received, job.round, limit=limit)

    def train(self) -> Ending:
        """Train on the ranks of this task, and check the update if there is one."""
        job = self.job
        ending = start_ranks(job, work_of_round(job))
        if ending.code not in (Outcome.DONE, Outcome.CHECKPOINTED) and (job.trained / NAME).is_file():
            verify_manifest(job.trained)  # written last: what follows it cannot make the update less complete
            log.warning("the update was complete when %s", ending.reason)
            ending = Ending(code=0, reason="")
        if ending.code == Outcome.DONE:
            check_update(job)
        return ending

    def compress(self) -> None:
        """Take this facility's own tensors out of the update, and encode it as the settings ask."""
        job = self.job
        if job.round >= job.settings.rounds:
            return job.personal.name_received(job.trained, job.received)
        job.personal.take_out(job.trained, job.received, job.round)
        make_smaller(
            job.trained,
            model=job.received,
            state=job.state,
            round=job.round,
            settings=job.settings.training,
            patterns=job.personal.patterns,
            built_in=job.built_in,
            norms=job.settings.step_norms,
            masked=self.masks is not None,
        )

    def describe(self) -> None:
        """Complete the update's manifest: model kept, run, usage, scores, dataset, head of the audit log."""
        job = self.job
        if job.keeps_models:
            note_kept_model(job.trained, self.base)
        with_run(job.trained, self.run)
        with_usage(job.trained, job.meter.usage(job.notes))
        if self.received.kind == MODELS:
            write_scores_of_models(self.compared(), job.trained, job.settings, dataset=job.dataset)
            if self.missing:
                with_missing(job.trained, self.missing)
        elif job.settings.evaluation.due(job.round, job.settings.rounds):
            write_scores(job.received, job.trained, job.settings, dataset=job.dataset)
        if job.settings.dataset_card:
            with_dataset(job.trained, counts_of(job.dataset))
        with_head(job.trained, os.environ.get(AUDIT, ""))

    def deliver(self) -> None:
        """Mask or sign the update, and keep it for the case that the round is asked for again."""
        job = self.job
        if self.masks is not None:
            self.finished.keep(self.key, job.round, job.trained)
            clear_attempt(job.trained)
            self.mask(self.finished.place(job.round))
            return
        if job.settings.training.signing_key:
            sign_update(job.out, job.settings, job.round)
        self.finished.keep(self.key, job.round, job.out)
        if self.decided is not None:
            remember_beside(job.state, time.time() - self.decided - read_report(job.out).seconds.train)
        forget_earlier(job.state, job.round)
        clear_attempt(compared_place(job.state))

    def mask(self, update: Path) -> None:
        """Leave the masked form of a finished update; the update itself stays here, where it will be evaluated."""
        job = self.job
        assert self.masks is not None
        if job.settings.evaluation.own_models:
            keep_own_update(job.state, update, job.round)
        self.masks.make(update, received=job.received, key=self.key, out=job.out)

    def compared(self) -> dict[str, Path]:
        """Every model that is evaluated, by name: those received, and this facility's own."""
        own = compared_place(self.job.state)
        received = {name: self.job.arguments.model / name for name in folders_of(self.received)}
        return received | {path.name: path for path in (sorted(own.iterdir()) if own.is_dir() else [])}


def check_update(job: Job) -> None:
    """Raise `ManifestError` unless the training process left what it promised."""
    manifest = read_manifest(job.trained)
    found = (manifest.kind, manifest.federation, manifest.facility, manifest.round)
    expected = ("update", job.settings.federation, job.settings.facility, job.round)
    if found != expected:
        raise ManifestError(f"{job.trained} is {found}, expected {expected}")
    module = job.arguments.module or job.settings.trainer.module
    check_budget(job.trained, job.settings, job.round, module=module)
