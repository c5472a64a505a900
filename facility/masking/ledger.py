"""What this facility has answered: one set of survivors for each round and for each model, written before the answer.

Two sums of the same steps over different facilities give away their difference, and sums over the same facilities under
other weights or clips are as many equations for the same few unknowns. So a second request for the same round, or for
steps from the same model, is answered only if it names the same survivors, which count the same, are clipped alike and
train on the same;
and a second one under the same keys only if it is the same to the byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from facility.exchange.errors import InputError
from facility.exchange.files.durable import complete_lines, fsync_directory, write_all
from facility.exchange.files.locks import take_lock
from facility.exchange.masking.roster import Roster
from facility.exchange.messages.masking import MaskingSettings

NAME = "answered.jsonl"
WAY_OUT = (
    "expected the same facilities, settings, data and amounts as then. A federation that begins anew from the same "
    "model with others needs another `name`, or another model, to which all its facilities agree"
)
"""Where an answer is refused. What two such sums say together, nothing here bounds: people decide."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One answer."""

    run: str
    round: int
    base_sha256: str
    generation: str
    request: str
    """Digest."""
    survivors: list[str]
    weighing: str = ""
    """Digest of what each of them counts and how all are clipped (`weighing_of`); '': noted before this was kept."""


@dataclass(frozen=True, kw_only=True)
class AnswerLedger:
    """The answers of one facility in one federation, below its state directory."""

    state: Path

    @property
    def path(self) -> Path:
        return Path(self.state) / "masking" / NAME

    def record(self, entry: Entry) -> None:
        """Note an answer durably. Raises `InputError` where an earlier one forbids it."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._alone():
            answered = self.entries()
            for earlier in answered:
                if reason := conflict(earlier, entry):
                    raise InputError(reason)
            self._append([entry] if entry not in answered else [])
            fsync_directory(self.path.parent)
            fsync_directory(self.path.parent.parent)

    def _append(self, entries: Sequence[Entry]) -> None:
        """Add lines in place of what a crash cut off, or none of them; what is there is on disk afterwards, even what
        a process wrote that was killed before it was."""
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            whole = sum(map(len, complete_lines(self.path)))
            os.ftruncate(descriptor, whole)
            try:
                for entry in entries:
                    write_all(descriptor, json.dumps(dataclasses.asdict(entry)).encode() + b"\n")
                os.fsync(descriptor)
            except OSError:
                os.ftruncate(descriptor, whole)  # not answered, so not noted
                raise
        finally:
            os.close(descriptor)

    def check(self, roster: Roster, settings: MaskingSettings) -> None:
        """Raise `InputError` where no sum under this roster could be answered after what was: before it is trained."""
        for earlier in self.entries():
            if not set(earlier.survivors) <= set(roster.keys):
                survivors, weighing = roster.members, ""
            else:
                survivors, weighing = earlier.survivors, weighing_of(roster, earlier.survivors, settings)
            asked = Entry(
                run=roster.agreement.run,
                round=roster.agreement.round,
                base_sha256=roster.agreement.base_sha256,
                generation="",
                request="",
                survivors=survivors,
                weighing=weighing,
            )
            if reason := conflict(earlier, asked):
                raise InputError(f"{reason}. So nothing is trained")

    def entries(self) -> list[Entry]:
        """All answers. Raises `InputError` where the file is damaged: then nothing is answered.

        A line that a crash or a full disk cut off was not answered: a line is on disk before its answer.
        """
        try:
            return [Entry(**json.loads(line)) for line in complete_lines(self.path)]
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{self.path} is damaged ({error}): what was answered before is not known, so nothing is answered; "
                "restore the file from a backup of after the last answer, or begin a federation of another `name`"
            ) from None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with open(self.path.with_suffix(".lock"), "a", encoding="utf-8") as file:
            take_lock(file, self.path)
            yield


def conflict(earlier: Entry, asked: Entry) -> str:
    """Why `asked` must not be answered after `earlier`, or ''."""
    if earlier.generation == asked.generation and earlier.request != asked.request:
        return f"another request was answered under the same keys (round {earlier.round})"
    same_round = (earlier.run, earlier.round) == (asked.run, asked.round)
    if not same_round and earlier.base_sha256 != asked.base_sha256:
        return ""
    if earlier.survivors != asked.survivors:
        return (
            f"round {asked.round} was answered for the sum over {', '.join(earlier.survivors)}; a second sum, over "
            f"{', '.join(asked.survivors)}, would give away the difference; {WAY_OUT}"
        )
    same_sum = earlier.weighing != "" and earlier.weighing == asked.weighing
    if not same_sum and earlier.request != asked.request:
        return (
            f"round {asked.round} was answered for another weighted sum over {', '.join(earlier.survivors)}: sums of "
            "the same updates under other weights, amounts of training, seeds, data, clips or bits would give away "
            f"single ones; {WAY_OUT}"
        )
    return ""


def weighing_of(roster: Roster, survivors: Sequence[str], settings: MaskingSettings) -> str:
    """Digest of all that turns the steps of the survivors into their sum, but for masks and for one common factor."""
    weights = roster.weights(settings.weights, settings.maximum_share)
    largest = max(weights[name] for name in survivors)
    agreement = roster.agreement
    decisive = {
        "weights": {name: f"{weights[name] / largest:.9e}" for name in survivors},
        "steps": {name: roster.keys[name].steps for name in survivors},
        "samples": {name: roster.keys[name].samples for name in survivors},
        "walk": sorted({roster.keys[name].walk for name in survivors}),
        "told": {name: roster.keys[name].told for name in survivors},
        "clip_norm": float(settings.clip_norm),
        "bits": agreement.bits,
        "moments": None if settings.moments is None else settings.moments.common,
        "clips": agreement.clips,
        "default_clip": agreement.default_clip,
    }
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()
