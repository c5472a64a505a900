"""The contract of a trainer as laws, in the order in which a conformance run tries them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from facility.conforming.finding import Finding, check_law
from facility.conforming.trial import FACILITY, FEDERATION, ROUNDS, STEPS, Ended, Trial
from facility.exchange.checkpoints.checkpoint import FLOATS, Checkpoint, open_checkpoint
from facility.exchange.errors import InputError
from facility.exchange.exit_codes import ExitCode
from facility.exchange.messages.manifest import read_manifest, verify_manifest
from facility.exchange.messages.outcome import Outcome
from facility.exchange.messages.progress import FILE as PROGRESS
from facility.exchange.messages.progress import read_progress
from facility.exchange.messages.report import read_report

SAME = 1e-4
"""Largest difference of a weight between two runs of the same command."""
BAD_INPUT = int(ExitCode.INPUT)
"""Exit code of a command whose input must be changed."""


def check_laws(trial: Trial) -> Iterator[Finding]:
    """Every law in turn; where the first round fails, no other is tried."""
    first = trial.run("first", model=trial.model, round=0)
    yield ended(first, "round 0 ends with exit code 0")
    if first.code:
        return
    sealed = check_law(
        "the update has a manifest of its round over its files", lambda: identity(trial, first.update, 0)
    )
    yield sealed
    if not sealed.kept:
        return
    yield check_law("it holds every tensor of the model by name and shape", lambda: tensors(trial.model, first.update))
    yield check_law("report.json is complete", lambda: report(first.update, 0))
    yield check_law("training changes the weights", lambda: moved(trial.model, first.update))
    yield check_law("progress.json, where it is written, can be read", lambda: progress(first.update.parent))
    yield from repeated(trial, first)
    yield from following(trial, first)
    yield from interrupted(trial, first)
    yield from refused(trial)


def repeated(trial: Trial, first: Ended) -> Iterator[Finding]:
    """Law: the same command without the state of the first gives the same weights."""
    again = trial.run("again", model=trial.model, round=0, state="again-state")
    yield ended(again, "the same command ends with exit code 0 again")
    if not again.code:
        yield check_law("with the same weights", lambda: alike(first.update, again.update))


def following(trial: Trial, first: Ended) -> Iterator[Finding]:
    """Round 1, and the evaluation of the final model."""
    trial.make_next_model(first.update)
    second = trial.run("second", model=trial.next_model, round=1)
    yield ended(second, "round 1 goes on from a model and a state")
    if not second.code:
        yield check_law("its update is of round 1", lambda: identity(trial, second.update, 1))
    last = trial.run("last", model=trial.next_model, round=ROUNDS)
    yield ended(last, "the final model is evaluated")
    if not last.code:
        yield check_law("without training it", lambda: evaluated(last.update))


def interrupted(trial: Trial, first: Ended) -> Iterator[Finding]:
    """SIGTERM while it trains, then the same command in the same place.

    A round that reports no steps is stopped after a share of the first one's time; had it ended by then, another is
    stopped earlier.
    """
    reports = (first.update.parent / PROGRESS).is_file()
    for share in (3.0,) if reports else (0.7, 0.5, 0.35):
        place, latest = f"stopped-{share}", max(1.0, first.seconds * share)
        stopped = trial.run(place, model=trial.model, round=0, state=f"{place}-state", stop_after=latest)
        if stopped.code:
            break
    yield check_law("SIGTERM ends it, and leaves no half update", lambda: leaves_nothing(stopped))
    if not stopped.code:
        return
    resumed = trial.run(place, model=trial.model, round=0, state=f"{place}-state")
    yield ended(resumed, "the same command then ends with exit code 0")
    if not resumed.code:
        yield check_law("with the weights of a round that nothing stopped", lambda: alike(first.update, resumed.update))


def refused(trial: Trial) -> Iterator[Finding]:
    """Models that must not be trained."""
    for what, model in (("no model", trial.empty_model()), ("a model that was altered", trial.tampered_model())):
        result = trial.run(f"refused {model.name}", model=model, round=0, state=f"{model.name}-state")
        yield check_law(f"{what} is refused with exit code {BAD_INPUT} and no update", lambda r=result: refuses(r))  # type: ignore[misc]


def ended(round: Ended, law: str) -> Finding:
    """The finding whether a run ended with exit code 0."""
    return Finding(law=law, kept=round.code == 0, found=f"{round.code}: {round.said}" if round.code else "")


def identity(trial: Trial, update: Path, round: int) -> str:
    """Raise `InputError` where an update's manifest names another round, facility or base."""
    manifest = verify_manifest(update)
    found = (manifest.kind, manifest.federation, manifest.facility, manifest.round)
    if found != (expected := ("update", FEDERATION, FACILITY, round)):
        raise InputError(f"the manifest says {found}, expected {expected}")
    model = trial.next_model if round else trial.model
    if manifest.base_sha256 != read_manifest(model).content_sha256:
        raise InputError("base_sha256 is not the digest of the received model (`content_sha256` of its manifest)")
    return ""


def tensors(model: Path, update: Path) -> str:
    """Raise `InputError` unless an update holds the model's tensors, all finite; returns how many."""
    wanted, found = open_checkpoint(model), open_checkpoint(update)
    shapes = [{name: entry.shape for name, entry in one.tensors.items()} for one in (wanted, found)]
    if shapes[0] != shapes[1]:
        odd = sorted(set(shapes[0].items()) ^ set(shapes[1].items()))[:3]
        raise InputError(f"the update's tensors are not the model's: {odd}; expected its names and shapes")
    import torch

    for name, entry in found.tensors.items():
        if entry.dtype in FLOATS and not torch.isfinite(found.read(name)).all():
            raise InputError(f"tensor {name!r} holds NaN or infinity")
    return f"{len(found.tensors)} tensors"


def report(update: Path, round: int) -> str:
    """Raise `InputError` for a report of another round, or without counts; returns its losses."""
    found = read_report(update)
    of = (found.federation, found.facility, found.round)
    if of != (expected := (FEDERATION, FACILITY, round)):
        raise InputError(f"report.json is of {of}, expected {expected} (federation, facility, round)")
    if not found.samples or not found.tokens or not found.steps:
        counts = f"samples {found.samples}, tokens {found.tokens} and steps {found.steps}"
        raise InputError(f"report.json counts {counts}, expected what was trained on: that weighs the update")
    return f"loss {found.loss_received:.3f} to {found.loss_returned:.3f}"


def moved(model: Path, update: Path) -> str:
    """Raise `InputError` where training changed nothing; returns the largest change."""
    if (largest := _apart(open_checkpoint(model), open_checkpoint(update))) == 0:
        raise InputError("the update is the received model, expected weights that training changed")
    return f"by up to {largest:.2g}"


def alike(one: Path, other: Path) -> str:
    """Raise `InputError` where two runs of one command differ by more than rounding."""
    if (largest := _apart(open_checkpoint(one), open_checkpoint(other))) > SAME:
        raise InputError(f"weights differ by up to {largest:.2g}: seed whatever is drawn from `seed` and the round")
    return f"apart by {largest:.2g}"


def progress(directory: Path) -> str:
    """How far the job says it is; never a fault, since a trainer may leave progress out."""
    file = directory / PROGRESS
    if not file.is_file():
        return "there is none: `crossfed status --follow` shows the job without its steps"
    return f"at step {read_progress(file.read_text(encoding='utf-8')).step}"


def evaluated(update: Path) -> str:
    """Raise `InputError` unless the answer to a final evaluation is a report alone; returns its loss."""
    found = read_report(update)
    if found.steps or any(update.glob("*.safetensors")):
        raise InputError(f"round {ROUNDS} of {ROUNDS} asks for an evaluation: no step, no weights")
    return f"loss {found.loss_received:.3f}"


def leaves_nothing(stopped: Ended) -> str:
    """Raise `InputError` where a run that was interrupted left an update; returns how it ended."""
    if not stopped.signalled or not stopped.code:
        return f"the round of {STEPS} steps had ended before the signal: not tried"
    if stopped.update.exists():
        raise InputError(
            f"it ended with {stopped.code} and left {stopped.update.name}: make it elsewhere and rename it"
        )
    if stopped.code == Outcome.CHECKPOINTED:
        return f"exit code {stopped.code}: its state is saved, and the next job resumes"
    return f"exit code {stopped.code}: a round that runs out of time counts as failed"


def refuses(result: Ended) -> str:
    """Raise `InputError` unless a run ended as one that refuses its model."""
    if result.update.exists():
        raise InputError(f"it ended with {result.code} and an update, expected {BAD_INPUT} and none")
    if result.code != BAD_INPUT:
        raise InputError(f"it ended with {result.code}, expected {BAD_INPUT}")
    return ""


def _apart(one: Checkpoint, other: Checkpoint) -> float:
    """Largest difference of two checkpoints' weights. Raises `InputError` where their tensors differ."""
    if one.tensors.keys() != other.tensors.keys():
        raise InputError("the two checkpoints hold different tensors, expected the same")
    return max((one.read(name).float() - other.read(name).float()).abs().max().item() for name in one.tensors)
