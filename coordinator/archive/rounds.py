"""The archive: a directory on the coordinator that outlives runs and holds every complete round.

    ARCHIVE/
        initial/model/            the model of round 0, with manifest
        round-0003/               appears whole, by rename
            model/                global model made by round 3 = input of round 4
            state/                float32 master and optimizer moments (coordinator.aggregate); newest round only
            message/              the model as a difference to the one before, if `sending` says so
                                  (coordinator.steps.send)
            clips.json            with secure aggregation: how large steps of the next round may be, by tensor
            round.json            RoundFile: outcomes by facility, decision, the aggregation's own record
        evaluation.json           the final model's perplexity by facility
        comparison.json           what the facilities found of all models after the last round
        comparison/               those models, until they have been compared (coordinator.comparison.models)
        rewound.json              after `crossfed rewind`: to which round, and whether its state is gone
        stopped.json              why a run ended early for a reason that needs a person; removed by the next start
        attempts.json             how often the round under way was asked for
        untold.json               the round that audit log and trackers do not have yet
        federation.json           what federation.yml asked for, as of the latest start (coordinator.rounds.changes)
        under_way.json            since when the round under way is
        limited.json              after which round a deadline or a budget ended the federation
        history.jsonl             one row a facility and round; derived from the round files
        unmasking/                the sum under way, with secure aggregation (coordinator.masking.pending)

Weights of old rounds may be pruned (`keep_rounds`); round.json stays. The state is needed by the next round alone: the
archive holds one, and two while a round commits.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from facility.exchange.checkpoints.companions import OWN, TENSORS, refuse_links_elsewhere
from facility.exchange.errors import InputError, ManifestError, NewerFormat
from facility.exchange.files import present
from facility.exchange.files.durable import new_directory, write_json, write_text
from facility.exchange.files.links import copy_tree
from facility.exchange.files.storage import file_error_sentence, is_storage
from facility.exchange.messages.manifest import Manifest, read_manifest, verify_manifest, with_run, write_manifest
from facility.exchange.messages.plausible import MOST_NODES
from facility.exchange.messages.strict_json import parse_json
from facility.exchange.validation import check_format, parse_dataclass, validated

FORMAT = 1
CLIPS = "clips.json"
"""In a round of masked updates: the clips of the next one, by tensor."""
ROUND = re.compile(r"round-(\d{4,})")
COMPARED = "comparison"
"""Folder of models that are compared after the last round."""
CHANGES = "changes"
"""Note: changes of federation.yml that the next round's file will record."""
REWOUND = "rewound"
"""Note: the round that comes after a rewind, and whether it begins without a state, which was pruned before."""


@validated(frozen=True, kw_only=True)
class FacilityRow:
    """One row of `history.jsonl`: what one facility did in one round."""

    round: int
    facility: str
    status: str
    """`ok`, `failed` (reported it), `absent` (left nothing), `late` (not done when the round closed) or `refused`
    (verification)."""
    reason: str = ""
    note: str = ""
    """What its report says beside figures: replicas that it lost during the round."""
    weight: float = 0.0
    """Normalised weight in the mean."""
    staleness: int = 0
    """Rounds before this one that its update was made for; more than 0 where rounds do not wait."""
    task: str = ""
    """What its losses are of (`facility.exchange.task_words`); empty: not reported."""
    tokens: int = 0
    samples: int = 0
    steps: int = 0
    work: float = 0.0
    """Of its update, as a multiple of the steps that its settings asked for then; 0: all take those."""
    seconds: float = 0.0
    """Load + train + evaluate + save at the facility."""
    tokens_per_second: float = 0.0
    loss_received: float | None = None
    """Validation loss of the model as received; nats per token. A late update's is `late_loss`."""
    late_loss: float | None = None
    """Of a late update: the same of the model that it was made from, which an earlier round received."""
    perplexity_received: float | None = None
    perplexity_returned: float | None = None
    accuracy_received: float | None = None
    """Share of right answers on its validation data; None for a task that has none."""
    accuracy_returned: float | None = None
    sent: str = "full"
    """How the round's model travelled to it, and why it was whole where messages are asked for; empty: it was sent
    none, for its job of an earlier round went on, or it could not be reached."""
    sent_bytes: int = 0
    received_bytes: int = 0
    """Of its update as it travelled."""
    moments_bytes: int = 0
    """Of both, those of optimizer moments that facilities average."""
    training_losses: list[tuple[int, float]] = field(default_factory=list)
    """Step, counted from 1, and mean training loss of the steps since the pair before; empty: not reported."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds at the facility by phase: load, train, evaluate, save."""
    loss_returned: float | None = None
    ranks: int = 0
    devices: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    update_sha256: str = ""
    """Digest of the update's content (`Manifest.content_sha256`)."""
    peak_memory_bytes: int = 0
    """Of its largest rank; 0: not reported."""
    predicted_memory_bytes: int = 0
    """What that rank was expected to need before anything was loaded; 0: not predicted."""
    usage: dict[str, Any] = field(default_factory=dict)
    """What the job used (`facility.exchange.messages.usage`); empty: not reported."""
    scores: dict[str, Any] = field(default_factory=dict)
    """`results` on tasks of the model that it received, and perhaps `problem`."""
    unasked: str = ""
    """Scores it reported without being asked, which are left out; empty: none."""
    dataset: dict[str, Any] = field(default_factory=dict)
    """Counts and digests of its dataset, where it allows them to be published."""
    privacy: dict[str, Any] = field(default_factory=dict)
    """Its privacy budget (`facility.exchange.messages.privacy.PrivacyReport`); empty: none reported."""
    drift: dict[str, Any] = field(default_factory=dict)
    """Its correction of drift (`facility.exchange.messages.drift.DriftReport`); empty: none reported."""
    holds: str = ""
    """Digest of the model that it said to keep; empty: none."""

    @property
    def nodes(self) -> int:
        """Nodes of the facility's job, as it reported, and at most its node-seconds over its seconds, which say more
        where the job took long to start; 1 where they say nothing."""
        reported = float(self.usage.get("node_seconds") or self.seconds)
        most = max(1, round(min(reported / self.seconds, MOST_NODES))) if self.seconds > 0 else 1
        return min(int(self.usage.get("nodes") or most), most)


@validated(frozen=True, kw_only=True)
class LaterLoss:
    """A round's global loss that became known, or better known, in a later round."""

    loss: float
    over: list[str]
    """Facilities whose figures count in it."""


@validated(frozen=True, kw_only=True)
class Wait:
    """How long a round stayed open to facilities that were still to come when its quorum had delivered."""

    quorum: int
    """Facilities."""
    seconds: float | None
    """None: until all were done."""
    learned: bool = False
    """Whether `grace: auto` chose it."""


@validated(frozen=True, kw_only=True)
class RoundFile:
    """`round.json`."""

    round: int
    facilities: list[FacilityRow]
    global_loss: float | None
    """Validation loss of the model that this round *received* (`coordinator.steps.global_loss`); nats per token."""
    global_loss_over: list[str] = field(default_factory=list)
    """Facilities whose figures of this round count in `global_loss`."""
    later_losses: dict[str, LaterLoss] = field(default_factory=dict)
    """By number of an earlier round: its `global_loss`, including losses that late updates reported."""
    decision: str
    """`go on`, or why this was the last round."""
    ended: bool = False
    """True when the federation stopped here before its last round."""
    broken: bool = False
    """True when it stopped for a reason that needs a person: the loss diverged."""
    scores: dict[str, Any] = field(default_factory=dict)
    """`results` on tasks of the model that it received, found by the coordinator itself, and perhaps `problem`."""
    attempts: int = 1
    wait: Wait | None = None
    """None: the quorum is all, or fewer than it delivered before all had ended."""
    outer_factor: float = 1.0
    """What the guard multiplied the server learning rate by."""
    guard: str = ""
    """Why that changed in this round; empty: it did not."""
    decay: float = 1.0
    """What the schedule of the server learning rate multiplied it by."""
    present: float = 1.0
    """What `aggregation.incomplete_rate` multiplied it by: the share of the facilities' weight that was there."""
    finished: str = ""
    """UTC, ISO 8601."""
    seconds: float = 0.0
    """Wall time since it began, queues included; 0: it was interrupted, and its time says nothing."""
    next_steps: dict[str, int] = field(default_factory=dict)
    """Steps that the next round asks of each facility, where they are evened out; else empty."""
    next_steps_reason: str = ""
    """Why these."""
    next_end: float = 0.0
    """Seconds from the new model to when the next round is expected to end, where jobs take steps until then; else
    0."""
    changes: list[str] = field(default_factory=list)
    """What was changed in federation.yml since the round before, and what followed from it; and whether the round was
    begun again by `crossfed rewind`."""
    aggregation: dict[str, Any] = field(default_factory=dict)
    model_sha256: str = ""
    """Digest of the new model's content."""
    message: dict[str, Any] = field(default_factory=dict)
    """The difference between the new model and the one before: encoding, bytes, error; or why there is none."""
    format: int = FORMAT


CARRIED = "not done when the round closed: its job goes on, and its update is averaged in a later round"
"""Reason in the row of a late facility whose work is not lost."""
DISCARDED = "not done when the round closed: its job goes on, and its update is discarded"
"""Reason in the row of one whose work is."""
BUSY = "its job of an earlier round still runs"
"""Reason in the row of one that was not sent the round's model, since its update is discarded."""
UNREACHED = "it could not be reached before the round closed; it begins the next one from the newest model"
"""Reason in the row of one that was not sent it, since its login or host did not answer."""


@dataclass(frozen=True)
class Archive:
    """Access to one archive directory; holds no state of its own."""

    path: Path

    def rounds(self) -> list[int]:
        """Numbers of the complete rounds, ascending. Raises `InputError` when one is missing in between."""
        if not present.is_dir(self.path):
            return []
        found = sorted(int(m[1]) for entry in self.path.iterdir() if (m := ROUND.fullmatch(entry.name)))
        if found != list(range(len(found))):
            raise InputError(
                f"archive {self.path} holds rounds {found}, expected 0 to {len(found) - 1} without gaps; restore "
                "what is missing"
            )
        return found

    def round_directory(self, number: int) -> Path:
        return self.path / f"round-{number:04d}"

    @property
    def compared(self) -> Path:
        """Where the models that are compared after the last round lie; empty again once that is over."""
        return self.path / COMPARED

    def model_for(self, number: int) -> Path:
        """Directory of the global model that is the input of round `number`."""
        return self.path / "initial" / "model" if number == 0 else self.round_directory(number - 1) / "model"

    def message_for(self, number: int) -> Path | None:
        """Where the model of round `number` is stored as a difference to that of the round before, if one was made."""
        return None if number == 0 else self.round_directory(number - 1) / "message"

    def state_for(self, number: int) -> Path | None:
        """Aggregation state that round `number` starts from; None for round 0, and after a rewind past the newest."""
        rewound = self.read_note(REWOUND)
        if number == 0 or (rewound.get("round") == number and rewound.get("stateless", True)):
            return None
        return self.round_directory(number - 1) / "state"

    def read_round(self, number: int) -> RoundFile:
        path = self.round_directory(number) / "round.json"
        try:
            raw = _mapping(path)
            check_format(raw, FORMAT, file=path)
            return parse_dataclass(RoundFile, raw, file=path, update="update CrossFed here")
        except NewerFormat:  # going back would not help
            raise
        except (OSError, ValueError) as error:
            raise _unreadable(path, error, self.way_back(number)) from None

    def way_back(self, number: int) -> str:
        """How to repeat round `number`: from it on, or from the newest one before it whose model was not pruned."""
        kept = next((one for one in range(number, 0, -1) if self.model_for(one).is_dir()), 0)
        repeated = (
            f"round {number}" if kept == number else f"rounds {kept} to {number}, for the models between are pruned"
        )
        return f"or go back: `crossfed rewind --to {kept}` repeats {repeated}"

    def history(self) -> list[RoundFile]:
        return [self.read_round(number) for number in self.rounds()]

    def clean(self) -> None:
        """Remove what a killed run left under temporary names."""
        for entry in self.path.glob(".*.tmp"):
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()

    def begin(self, model: Path, federation: str) -> None:
        """Keep the initial model, or check that it is still the one the archive began with.

        Raises `InputError` when the archive belongs to another federation or began with other weights, and for a model
        with a link to other files of this account, which would be sent to facilities.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        initial = self.path / "initial"
        given = _manifest_of(model)
        if not present.exists(initial):
            refuse_links_elsewhere(model, but=TENSORS)
            with new_directory(initial) as temporary:
                copy_tree(model, temporary / "model", leave=OWN)
                _describe(temporary / "model", federation)
                with_run(temporary / "model", secrets.token_hex(16))
        try:
            kept = verify_manifest(initial / "model")
        except ManifestError as error:
            raise ManifestError(f"{error.found}; restore that file from a copy: {model} was copied there") from None
        if kept.federation != federation:
            raise InputError(
                f"archive {self.path} belongs to federation {kept.federation!r}, not {federation!r}; choose another "
                "archive, or give the federation its name back"
            )
        if given is not None and not self.rounds() and given.content_sha256 != kept.content_sha256:
            raise InputError(
                f"archive {self.path} began with another initial model than {model}; remove {initial} to begin with "
                "this one"
            )

    @contextmanager
    def append(self, number: int) -> Iterator[Path]:
        """Yield a directory to fill with model/, state/ and round.json; it appears atomically as round `number`."""
        with new_directory(self.round_directory(number)) as temporary:
            yield temporary
        self.drop_note(REWOUND)
        self.write_history()

    def write_history(self) -> None:
        rows = [
            json.dumps(vars(row), ensure_ascii=False)  # plain data; `asdict` copies, ten times as long
            for entry in self.history()
            for row in entry.facilities
        ]
        write_text(self.path / "history.jsonl", "".join(row + "\n" for row in rows))

    def prune(self, keep: int, *, also: int | None = None) -> None:
        """Remove what the next round cannot need: every state but the newest, models before the last `keep` rounds.

        `keep` 0 keeps all models; the model that round `also` received stays. round.json always stays.
        """
        rounds = self.rounds()
        for number in rounds[:-1]:
            shutil.rmtree(self.round_directory(number) / "state", ignore_errors=True)
        for number in rounds[:-keep] if keep else []:
            if also is not None and number == also - 1:
                continue
            for name in ("model", "message"):
                shutil.rmtree(self.round_directory(number) / name, ignore_errors=True)

    def read_note(self, name: str) -> dict[str, Any]:
        """A small JSON file of the archive (`stopped`, `attempts`, `evaluation`); empty when absent."""
        path = self.path / f"{name}.json"
        try:
            return _mapping(path)
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise _unreadable(path, error, "or remove it") from None

    def write_note(self, name: str, value: dict[str, Any]) -> None:
        write_json(self.path / f"{name}.json", value)

    def drop_note(self, name: str) -> None:
        (self.path / f"{name}.json").unlink(missing_ok=True)


def _mapping(path: Path) -> dict[str, Any]:
    """The JSON object in a file of the archive, of any size. Raises `ValueError` for anything else."""
    return parse_json(path.read_text(encoding="utf-8"), where=path, bounded=False)


def _unreadable(path: Path, error: OSError | ValueError, otherwise: str) -> InputError:
    """What a person reads of a file of the archive that cannot be read; `otherwise`: where there is no copy."""
    if is_storage(error):  # nothing is wrong with the file
        return InputError(file_error_sentence(error, path))
    found = str(error) if isinstance(error, InputError) else f"{path} cannot be read: {error}"
    return InputError(f"{found}; restore it from a copy, {otherwise}")


def _manifest_of(model: Path) -> Manifest | None:
    return read_manifest(model) if present.exists(model / "manifest.json") else None


def _describe(model: Path, federation: str) -> None:
    from facility.exchange.checkpoints.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model)
    write_manifest(
        model,
        Manifest(
            kind="model", federation=federation, round=0, dtypes=checkpoint.dtypes(), parameters=checkpoint.parameters
        ),
    )
