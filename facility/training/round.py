"""One round on one rank, stage by stage; its state is in the attributes of `Round`."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.checkpoints.conversion import Conversion
from facility.exchange.errors import InputError, NotWritten
from facility.exchange.messages.privacy import WITHHELD
from facility.exchange.messages.progress import Stage
from facility.exchange.seeds import derive_seed
from facility.exchange.task_words import TaskWords, words_of
from facility.launching.replica_notes import ReplicaNote, note_replica
from facility.sync.protocol import Synchroniser
from facility.training.batch_norm import average_statistics
from facility.training.data.documents import check_separation
from facility.training.data.inputs import RoundInputs
from facility.training.data.preference import Preference
from facility.training.drift import DriftCorrection
from facility.training.engine import StepResult
from facility.training.lost import lost_replicas, replica_share
from facility.training.monitor.clock import Clock
from facility.training.monitor.logs import start_logging
from facility.training.monitor.trace import Trace
from facility.training.monitor.tracker import Tracker
from facility.training.prepare import Setup, build_engine
from facility.training.privacy.private import private_training
from facility.training.processes.ranks import Ranks, agree_on_failure, gather, regroup
from facility.training.processes.rendezvous import serves_others
from facility.training.progress import Progress, show_stage
from facility.training.replicas import build_synchroniser, independent_replicas
from facility.training.request import RoundRequest
from facility.training.schedule import learning_rate, scheduled_step
from facility.training.shards import add_shards
from facility.training.state import state
from facility.training.state.reference import prepare_reference
from facility.training.state.resume import SavedState, restore_state, restore_vectors, that_fits
from facility.training.state.step_counts import steps_seen
from facility.training.state.update import is_personal, round_in_place
from facility.training.stop import Stop

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Times:
    """When stages ended, in seconds of time.perf_counter."""

    loaded: float = 0.0
    evaluated: float = 0.0
    """The received model's evaluation."""
    trained: float = 0.0
    evaluated_again: float = 0.0
    """The returned model's evaluation."""


class Round:
    """Stages in the order in which they are called; each uses what the earlier ones left."""

    sync: Synchroniser

    def __init__(self, request: RoundRequest, ranks: Ranks, inputs: RoundInputs, setup: Setup) -> None:
        """Build the received model on this rank."""
        self.request, self.ranks, self.inputs, self.setup = request, ranks, inputs, setup
        self.clock = Clock(ranks.device)
        self.engine = build_engine(request, inputs, setup, ranks, self.clock)
        self.private = private_training(request, inputs, self.engine, ranks)
        """Differentially private steps and evaluations, in place of plain ones; None without differential privacy."""
        self.replicas, self.replica = independent_replicas(self.engine)
        self.share = replica_share(setup.layout, self.replica, together=self.engine.together)
        """Sequences of a batch that this replica takes a step on."""
        self.counts = ranks.first if self.engine.together else setup.layout.grid.place(ranks.rank)[1:] == (0, 0)
        """True on the one rank of a replica that reports what the replica has trained on."""
        self.writes = setup.layout.grid.place(ranks.rank)[0] == 0
        """True on the ranks of the first replica, which writes what all replicas agree on."""
        self.drift: DriftCorrection | None = None
        """What moves every step by `drift_correction`; None: it is off."""
        self.times = Times()
        self.step_ends: list[float] = []
        """When each step of this start ended (time.perf_counter)."""

    def restore(self, saved: SavedState) -> None:
        """Put optimizer state back; mid-round also weights and counts."""
        self.saved = that_fits(self.request, saved, self.engine)
        self.progress = restore_state(
            self.request, self.saved, self.engine, replica=self.replica, replicas=self.replicas
        )
        if self.request.training.drift_correction and not self.request.evaluates_only:
            self._begin_correction()
        self.times.loaded = time.perf_counter()

    def _begin_correction(self) -> None:
        """Turn drift correction on for this round, where the mean walk and this facility's own are known."""
        engine = self.engine
        self.drift = DriftCorrection(engine.parts, rates=self.progress.rates)
        with agree_on_failure(self.ranks):
            self.drift.begin(self.request, self.conversion, engine.assembly.shapes)
        found = gather(self.ranks, [self.drift.squares, self.drift.own] if self.writes else [0.0, 0.0])
        self.drift.hold_back(*(math.fsum(column) for column in zip(*found, strict=True)))
        engine.correct = self.drift.step
        log.info("drift: %s", self.drift.reason)

    @property
    def conversion(self) -> Conversion | None:
        """How stored tensors make the parameters that are trained; adapters are stored as they are."""
        return None if self.request.training.lora.rank else self.engine.assembly.names.conversion

    def budget(self) -> AbstractContextManager[None]:
        """Hold the privacy budget's ledger for what is released inside; nothing without differential privacy."""
        return (
            nullcontext()
            if self.private is None
            else self.private.budget(self.progress.done, resumed=self.saved.checkpoint is not None)
        )

    def show(self, stage: Stage) -> None:
        """Say in the job's directory which stage begins."""
        done, steps = self.progress.done, self.request.training.steps
        show_stage(self.ranks, self.request.job_directory, stage, done=done, steps=steps)

    def evaluate_received(self) -> None:
        """Evaluate the received model (once per round), then add the residual of earlier updates to its weights, or
        the share of it that is trained from."""
        self.show("evaluating")
        if self.inputs.task.separate:
            check_separation(self.engine.loss_of, self.inputs, self.request.training.compute_dtype)
        if isinstance(self.inputs.task, Preference):
            prepare_reference(self.request, self.inputs, self.engine, self.ranks)
        if self.saved.checkpoint is None:
            self.progress.loss_received = self.evaluate()
            check_loss(
                self.progress.loss_received,
                "received",
                "the model overflows in training.compute_dtype, or nothing in this data is to be predicted",
            )
            self.progress.accuracy_received = self.engine.accuracy
            if self.request.unsent is not None:
                with agree_on_failure(self.ranks):
                    unsent = open_checkpoint(self.request.unsent)
                    add_shards(
                        self.engine.parts, unsent, self.engine.assembly.names.conversion, self.request.unsent_share
                    )
        else:
            log.info("resuming after step %d of %d", self.progress.done, self.request.training.steps)
        loss = self.progress.loss_received
        log.info("received: %s", figures_of(self.words, loss, self.progress.accuracy_received))
        self.times.evaluated = time.perf_counter()

    def evaluate(self) -> float:
        """Mean validation loss of the weights as they are; noised with differential privacy."""
        if self.private is not None:
            return self.private.evaluate()
        return self.engine.evaluate(self.setup.loader.evaluation())

    def connect_replicas(self) -> None:
        """Join the other replicas of this facility under the policy of `training.sync`."""
        request, progress = self.request, self.progress
        name = f"sync-{request.round}.{progress.interruptions}" if progress.interruptions else f"sync-{request.round}"
        self.sync = build_synchroniser(
            self.engine,
            steps=request.training.steps,
            done=progress.done,
            samples=progress.samples,
            round=request.round,
            log=request.state / name,
        )
        vectors = self.sync.state_dict()
        with agree_on_failure(self.ranks):
            restore_vectors(
                request, self.saved, progress, self.engine, vectors, replica=self.replica, replicas=self.replicas
            )
        self.sync.load_state_dict(vectors)
        if not self.engine.together and not serves_others(self.ranks):
            note_replica(self.ranks.number, ReplicaNote(replica=self.replica))

    def train(self, stop: Stop) -> bool:
        """Take the round's steps; False where `stop` ended them early and a mid-round checkpoint was written."""
        request, engine, sync, progress = self.request, self.engine, self.sync, self.progress
        training, settings = request.training, request.settings
        batch = self.setup.layout.shape.batch_sequences
        run = f"{settings.federation}-{settings.facility}-{request.round}"
        tracker = Tracker(training.tracker, request.state, run, self.ranks)
        if tracker.reason:
            log.info("%s", tracker.reason)
        trace = Trace(training.trace, request.state, request.round, self.ranks)
        shown = Progress(
            request.job_directory,
            steps=training.steps,
            step_tokens=batch * self.inputs.block_tokens,
            always=request.every_step,
        )
        while sync.wants_more() and not self._pausing(stop):
            overall = self.overall_step
            result = self._step()
            loss = WITHHELD if self.private or not result.predictions else result.loss
            progress.step(loss, skipped=result.skipped, batch=batch, share=self.share)
            if self._speaks():
                shown.step(progress.done, result)
            self.step_ends.append(time.perf_counter())
            loss_figures = {} if self.private else {"loss": result.loss}
            tracker.log(overall, **loss_figures, gradient_norm=result.gradient_norm, learning_rate=result.rate)
            trace.step()
            if training.limits.save_every and progress.done % training.limits.save_every == 0 and engine.together:
                self._save_on_the_way()
        finished = sync.finish()
        self._go_on_with(sync.members)
        average_statistics(engine.assembly.statistics, self.ranks, self._averaging(finished))
        progress.optimizer_steps = self._steps_seen()
        if not finished:
            self._checkpoint()
            reason = stop.reason or "requested by another rank"
            log.info(
                "stopped after step %d of %d (%s); the same command resumes here", progress.done, training.steps, reason
            )
        elif not engine.together:  # replicas went at speeds of their own: the next round begins where all are past
            progress.position += (training.steps - progress.done) * batch
        figures = sync.report()  # asked for after a pause too: it is what writes the policy's own log
        self.sync_report, self.sync_vectors = (figures, sync.state_dict()) if finished else ({}, {})
        self.lost = lost_replicas(self.sync_report, self.setup.layout, steps=training.steps, finished=sync.members)
        for resource in (sync, tracker, trace):
            resource.close()
        self.times.trained = time.perf_counter()
        return finished

    def _speaks(self) -> bool:
        """True on the one rank that reports progress: the first, or that of the first replica that is still here."""
        if self.engine.together or min(self.sync.members) == 0:
            return self.ranks.first
        grid = self.setup.layout.grid
        speaks = self.ranks.rank == int(grid.ranks[min(self.sync.members), 0, 0])
        if speaks and not log.isEnabledFor(logging.INFO):
            start_logging(self.ranks, self.request.name, speaks=True)
        return speaks

    def _go_on_with(self, members: Sequence[int]) -> None:
        """From here on every rank of the replicas `members` is needed, and no other takes part."""
        layout, ranks = self.setup.layout, self.ranks
        if self.engine.together:
            return
        note_replica(ranks.number, ReplicaNote(replica=self.replica, finishes=True))
        if len(members) == self.replicas:
            return
        grid = layout.grid
        remaining = sorted(grid.ranks[list(members)].flatten().tolist())
        self.ranks = self.engine.ranks = regroup(ranks, remaining, timeout_seconds=self.request.training.stall_seconds)
        self.replica, self.replicas = list(members).index(self.replica), len(members)
        self.writes = self.replica == 0
        _, _, column = grid.place(ranks.rank)
        self.setup.loader.evaluates = (self.replica * grid.shards + column, self.replicas * grid.shards)
        start_logging(self.ranks, self.request.name)
        log.warning("replicas %s finish the round without the others", ", ".join(map(str, members)))

    @property
    def words(self) -> TaskWords:
        """The words of this task's figures, for logs."""
        return words_of(self.inputs.dataset.manifest.task)

    @property
    def overall_step(self) -> int:
        """Steps since round 0, on average over the replicas: what the learning rate follows."""
        request = self.request
        planned = request.settings.training.steps
        return scheduled_step(request.round, self.sync.progress, steps=request.training.steps, planned=planned)

    def _pausing(self, stop: Stop) -> bool:
        """True once a pause is pending: this replica takes no further step in this job."""
        wanted = stop.wanted(self.progress.done, resumed=self.saved.checkpoint is not None)
        if self.engine.agree_to_stop(wanted) if self.engine.together else wanted:
            self.sync.ask_to_pause()
        return self.sync.pausing

    def _step(self) -> StepResult:
        """One optimizer step on the next batch, and what the policy does after it."""
        request, settings, done = self.request, self.request.settings, self.progress.done
        torch.manual_seed(derive_seed(settings.seed, "step", request.round, settings.facility, done, self.ranks.rank))

        def rate() -> float:
            return self.sync.step_scale * learning_rate(self.overall_step, request.total_steps, request.training)

        if self.private is not None:
            result = self.private.step(rate)
        else:
            with self.clock("data"):
                batches = self.setup.loader.step(self.progress.position)
            result = self.engine.step(batches, rate, None if self.engine.together else self.sync)
        self.sync.after_step(result.predictions)
        return result

    def _steps_seen(self) -> int:
        """Steps that this replica's moments have seen: those since they were last reset, where its policy does that."""
        counted = self.progress.optimizer_steps
        if self.engine.together or self.setup.layout.sync.state_policy != "reset":
            return counted
        here = steps_seen(self.engine.optimizer, self.engine.parts, counted)
        return min(steps for replica, steps in gather(self.ranks, [self.replica, here]) if replica == self.replica)

    def _averaging(self, finished: bool) -> dist.ProcessGroup | None:
        """The ranks whose running statistics are averaged: all, or before the end those with the same weights."""
        if finished or self.engine.together:
            return self.ranks.group
        return self.engine.assembly.model_group

    def _save_on_the_way(self) -> None:
        """Write a mid-round checkpoint. A full disk costs the round that checkpoint alone: the one before stays."""
        try:
            self._checkpoint()
        except NotWritten as error:
            done, steps = self.progress.done, self.request.training.steps
            log.warning("after step %d of %d no checkpoint was written, and the round goes on: %s", done, steps, error)

    def _checkpoint(self) -> None:
        """Write a mid-round checkpoint of every replica."""
        request, progress, settings = self.request, self.progress, self.request.settings
        mine = state.ReplicaProgress(
            steps=progress.done,
            position=progress.position,
            optimizer_steps=progress.optimizer_steps,
            losses=progress.losses,
            scale=self.engine.scale.value,
            steady=self.engine.scale.steady,
            skipped=self.engine.skipped,
            bad_in_a_row=self.engine.bad_in_a_row,
            samples=self.sync.samples,
            sequences=progress.sequences,
            rates=self.drift.rates if self.drift is not None else 0.0,
        )
        average_statistics(self.engine.assembly.statistics, self.ranks, self._averaging(finished=False))
        gathered = gather(self.ranks, [self.replica, dataclasses.asdict(mine)])
        first_of = {replica: state.ReplicaProgress(**found) for replica, found in gathered[::-1]}
        vectors = self.sync.state_dict()
        message = state.MidRoundCheckpoint(
            federation=settings.federation,
            facility=settings.facility,
            seed=settings.seed,
            round=request.round,
            base_sha256=self.inputs.base_sha256,
            loss_received=progress.loss_received,
            accuracy_received=progress.accuracy_received,
            seconds=progress.seconds_before + time.perf_counter() - self.times.evaluated,
            interruptions=progress.interruptions,
            replicas=[first_of[replica] for replica in range(self.replicas)],
            sync=sorted(vectors),
            optimizer=request.training.optimizer,
            betas=[request.training.beta1, request.training.beta2],
            compute_dtype=request.training.compute_dtype,
        )
        state.save_checkpoint(
            request.state,
            message,
            self.engine,
            vectors=vectors,
            replica=self.replica,
            writes=self.writes or not self.engine.together,
        )

    def evaluate_returned(self) -> None:
        """Round the weights to the dtype they are sent in, then evaluate them."""
        self.show("evaluating")
        with agree_on_failure(self.ranks):
            changed, names = [*self.engine.parts, *self.engine.assembly.statistics], self.engine.assembly.names
            sent = [part for part in changed if not is_personal(part, names, self.request.federated)]
            round_in_place(sent, self.request.training.export_dtype)
        self.loss_returned, self.accuracy_returned = self.evaluate(), self.engine.accuracy
        check_loss(self.loss_returned, "returned", "training diverged; lower training.learning_rate")
        log.info("returned: %s", figures_of(self.words, self.loss_returned, self.accuracy_returned))
        self.times.evaluated_again = time.perf_counter()
        self.show("saving")


def check_loss(loss: float, model: str, why: str) -> None:
    """Raise `InputError` for a validation loss that is not finite: no report can hold it."""
    if not math.isfinite(loss):
        raise InputError(f"the {model} model's loss on the validation data is {loss}, expected a number: {why}")


def figures_of(words: TaskWords, loss: float, accuracy: float | None) -> str:
    """What an evaluation found, for the log."""
    text = words.of_loss(loss)
    return text if accuracy is None else f"{text}, accuracy {accuracy:.4f}"
