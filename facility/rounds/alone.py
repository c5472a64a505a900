"""Training alone, to compare with: as many rounds as the facility took part in, from the initial model, on its own.

One job trains one round, with the seeds, the data order, the steps and the learning rates of the federation's rounds.
The model stays here, in float32, until its last round; then it leaves in the dtype of an update, to be compared, and is
never averaged. What is peculiar to federating is left out: shared second moments, the proximal term, encodings.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

from facility.exchange.checkpoints.checkpoint import ADAPTER, INDEX, SINGLE, open_checkpoint
from facility.exchange.errors import InputError
from facility.exchange.files import present
from facility.exchange.files.durable import new_directory, write_json
from facility.exchange.files.links import link_file, link_files, link_tree
from facility.exchange.json_values import values_in
from facility.exchange.messages import report as reports
from facility.exchange.messages.comparison import Alone, rounds_alone, steps_alone, with_alone
from facility.exchange.messages.manifest import NAME, SIGNATURE, Manifest, read_manifest, run_of, write_manifest
from facility.exchange.messages.outcome import Outcome
from facility.launching.supervise import Ending
from facility.rounds.job import DONE, GO, Job, Work, start_ranks
from facility.rounds.kept import by_round
from facility.rounds.sweep import forget_earlier

TOKENS = "alone_tokens"
"""In a kept model's `extra`: tokens trained on so far."""
MODEL = "model-"
FEDERATED = {
    "encoding": "full",
    "optimizer_state": "personal",
    "first_moments": "off",
    "drift_correction": False,
    "proximal": 0.0,
    "signing_key": "",
}
"""Training settings that mean something between facilities only."""


class OwnModel:
    """The model that a facility trains alone: `model-N` after N rounds."""

    def __init__(self, state: Path) -> None:
        self.place = Path(state) / "alone"

    @property
    def rounds(self) -> int | None:
        """Rounds done; None before the initial model was received."""
        return max(by_round(self.place, MODEL), default=None)

    def model(self, rounds: int) -> Path:
        return self.place / f"{MODEL}{rounds}"

    def begin(self, received: Path, run: str, wanted: int) -> int:
        """Rounds done in this run; keeps the initial model where there are none. Raises `InputError` without it.

        More than `wanted` are of rounds that were set aside since: training alone begins anew.
        """
        done = self.rounds
        if done is not None and (done > wanted or run_of(read_manifest(self.model(done))) != run):
            shutil.rmtree(self.place)
            done = None
        if done is None:
            if not any(path.suffix == ".safetensors" for path in received.iterdir()):
                raise InputError(
                    f"{self.place} holds no model that was trained alone, and the initial one was not sent along; it "
                    "is sent with the next order"
                )
            self.place.mkdir(parents=True, exist_ok=True)
            self._appear(received, 0, tokens=0)
            done = 0
        return done

    def advance(self, update: Path, rounds: int) -> None:
        """Make the trained `update` the model after `rounds` rounds; removes the one before."""
        before = read_manifest(self.model(rounds - 1))
        tokens = before.extra.get(TOKENS, 0) + reports.read_report(update).tokens
        self._appear(update, rounds, tokens=tokens, run=run_of(before))
        shutil.rmtree(update)
        for number, path in by_round(self.place, MODEL).items():
            if number < rounds and not (number == 0 and is_adapter(self.model(rounds))):
                shutil.rmtree(path)

    def to_train(self, rounds: int) -> Path:
        """The model that the next round starts from; adapters with the initial model below them."""
        own, initial = self.model(rounds), self.model(0)
        if not is_adapter(own) or is_adapter(initial):
            return own
        whole = self.place / "whole"
        shutil.rmtree(whole, ignore_errors=True)
        add_adapters(initial, own, whole)
        return whole

    def _appear(self, source: Path, rounds: int, *, tokens: int, run: str = "") -> None:
        """Keep `source` under a manifest that says how it came to be."""
        manifest = read_manifest(source)
        target = self.model(rounds)
        shutil.rmtree(target, ignore_errors=True)
        with new_directory(target) as temporary:
            link_files(source, temporary, leave=(NAME, SIGNATURE))
            extra = {"run": run or run_of(manifest), TOKENS: tokens}
            kept = dataclasses.replace(
                manifest, kind="model", round=rounds, facility=None, encoding="full", extra=extra
            )
            write_manifest(temporary, kept)


def train_alone(job: Job, received: Manifest) -> Ending:
    """The first task's part: one more round, unless all are done; then the report of it.

    Where updates are masked the model stays here, is evaluated here, and the report holds no weights.
    """
    if job.settings.differential is not None:
        raise InputError(
            "training alone spends a privacy budget of its own, beside that of the federation's rounds: with "
            "privacy.differential nothing is trained alone"
        )
    own = OwnModel(job.state)
    wanted = rounds_alone(received, job.settings.facility)
    if not wanted:
        raise InputError("it took part in no round of the federation, so there is nothing to train alone")
    done = own.begin(job.arguments.model, run_of(received), wanted)
    if done < wanted:
        write_json(own.place / "settings.json", settings_alone(job, last=done + 1 == wanted))
        own.to_train(done)
        shutil.rmtree(trained_at(job), ignore_errors=True)
        job.notes.write("first", GO)
        ending = start_ranks(job, work_alone(job))
        if ending.code != Outcome.DONE:
            return ending
        done += 1
        own.advance(trained_at(job), done)
        forget_earlier(own.place / "state", done)
    else:
        job.notes.write("first", DONE)
    hand_out(job, received, own.model(done), Alone(rounds=done, of=wanted, tokens=0))
    return Ending(code=0, reason="")


def work_alone(job: Job) -> Work:
    """The round that comes next, as every task of the job finds it."""
    own = OwnModel(job.state)
    done = own.rounds or 0
    whole = own.place / "whole"
    order, settings = read_manifest(job.arguments.model), job.settings
    return Work(
        model=whole if present.is_dir(whole) else own.model(done),
        settings=own.place / "settings.json",
        round=done,
        out=trained_at(job),
        state=own.place / "state",
        steps=steps_alone(order, settings.facility, done, most=settings.most_steps),
    )


def trained_at(job: Job) -> Path:
    """Where the trainer leaves the round's update: beside the job's own, so that its progress is seen there; where
    updates are masked in the state, which the coordinator does not read."""
    if job.hides:
        return OwnModel(job.state).place / "trained"
    return job.out.with_name(f".{job.out.name}.alone")


def settings_alone(job: Job, *, last: bool) -> dict[str, Any]:
    """The facility's settings for a round alone; all rounds but the last keep the model in float32."""
    raw: dict[str, Any] = values_in(Path(job.arguments.settings))
    dtype = job.settings.training.export_dtype if last else "float32"
    training = (raw.get("training") or {}) | FEDERATED | {"export_dtype": dtype}
    return {key: value for key, value in raw.items() if key != "masking"} | {"training": training}


def hand_out(job: Job, received: Manifest, model: Path, alone: Alone) -> None:
    """Leave a report where the job's update is expected, with the weights after the last round unless masks keep them
    here."""
    manifest = read_manifest(model)
    leaves = alone.rounds == alone.of and job.settings.masking is None
    alone = dataclasses.replace(alone, tokens=int(manifest.extra.get(TOKENS, 0)))
    number = job.settings.rounds
    shutil.rmtree(job.out, ignore_errors=True)
    with new_directory(job.out) as temporary:
        if leaves:
            for path in sorted(model.iterdir()):
                if path.is_file() and path.name not in (NAME, reports.REPORT):
                    link_file(path, temporary / path.name)
        reports.write(temporary, dataclasses.replace(reports.read_report(model), round=number))
        write_manifest(
            temporary,
            Manifest(
                kind="update",
                federation=job.settings.federation,
                facility=job.settings.facility,
                round=number,
                base_sha256=received.content_sha256,
                encoding="lora" if leaves and is_adapter(model) else "full",
                dtypes=manifest.dtypes if leaves else {},
                parameters=manifest.parameters if leaves else 0,
            ),
        )
        with_alone(temporary, alone)


def is_adapter(model: Path) -> bool:
    """True if these are adapters without the model below them."""
    return (model / ADAPTER).is_file() and not (model / SINGLE).exists() and not (model / INDEX).exists()


def add_adapters(model: Path, adapters: Path, out: Path) -> None:
    """A checkpoint with the files of `model` and, beside them, the adapters of another directory."""
    link_tree(model, out)
    (out / NAME).unlink()
    (out / ADAPTER).unlink(missing_ok=True)
    link_file(adapters / ADAPTER, out / ADAPTER)
    names = {name: entry.file.name for name, entry in open_checkpoint(model).tensors.items()}
    names |= dict.fromkeys(open_checkpoint(adapters).tensors, ADAPTER)
    (out / INDEX).unlink(missing_ok=True)
    write_json(out / INDEX, {"metadata": {}, "weight_map": dict(sorted(names.items()))})
    manifest = read_manifest(adapters)
    write_manifest(out, dataclasses.replace(manifest, kind="model", facility=None, encoding="full"))
