"""`report.json` and `failure.json`: what a facility reports of its round."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, field, fields
from pathlib import Path
from typing import Any, Literal

from facility.exchange.addresses import hidden_login
from facility.exchange.files.durable import write_json
from facility.exchange.messages.plausible import MOST_COUNT, MOST_LOSS, MOST_ROUNDS
from facility.exchange.messages.strict_json import Fields, read_message
from facility.exchange.perplexity import LARGEST_LOSS
from facility.exchange.task_words import KNOWN
from facility.exchange.validation import validated

FORMAT = 1
REPORT = "report.json"
FAILURE = "failure.json"
MOST_BYTES = 1 << 20
"""Of report.json and of failure.json."""
MOST_PERPLEXITY = math.exp(LARGEST_LOSS)
"""What `perplexity` gives at most: a page of larger numbers has no axis."""
PREDICTED_MEMORY = "predicted_memory_bytes"
"""In `details`: what the largest rank was expected to need before anything was loaded, as `peak_memory_bytes`."""
STEPS_SKIPPED = "steps_skipped"
"""In `details`: steps whose loss or gradient was not finite, which moved nothing."""
ACCURACIES = ("accuracy_received", "accuracy_returned")
"""In `details`: share of right answers on the validation data, of the model as received and as returned."""
TASK = "task"
"""In `details`: what the losses are of, one of `facility.exchange.task_words.KNOWN`."""
JOB_OUTPUT = "CROSSFED_JOB_OUTPUT"
"""Environment variable: 0 where nothing that a job prints may leave the facility."""
MOST_REASON = 1000
"""Characters."""
MOST_LOG = 20_000


@validated(frozen=True, kw_only=True)
class Seconds:
    """Wall time of the parts of a round."""

    load: float = 0.0
    train: float = 0.0
    evaluate: float = 0.0
    save: float = 0.0


@validated(frozen=True, kw_only=True)
class Report:
    """One facility's account of one round."""

    federation: str
    facility: str
    round: int
    samples: int
    """Sequences trained on in this round."""
    tokens: int
    """Tokens trained on in this round: the default weight of the update in the mean."""
    steps: int
    """Optimizer steps taken."""
    loss_received: float
    """Mean validation loss (nats per predicted token) of the model as received."""
    loss_returned: float
    """Mean validation loss of the model as returned (after rounding to the export dtype where possible)."""
    perplexity_received: float
    perplexity_returned: float
    training_loss: float
    """Mean training loss over the round's steps; -1 where it is withheld (differential privacy)."""
    seconds: Seconds = field(default_factory=Seconds)
    tokens_per_second: float = 0.0
    peak_memory_bytes: int = 0
    """Largest over the ranks."""
    seed: int = 0
    position: int = 0
    """Sequences of the dataset consumed since round 0: the next round goes on from here."""
    ranks: int = 1
    devices: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)
    """Further figures by name (time split, MFU, groups, ...); a reader may ignore them."""
    format: int = FORMAT


@validated(frozen=True, kw_only=True)
class Failure:
    """Left in place of an update when a facility could not finish its round."""

    facility: str
    round: int
    reason: str
    """One sentence for the user."""
    log_tail: str = ""
    """Last lines of the failing rank's output."""
    kind: Literal["failed", "refused", "absent", "late"] = "failed"
    """Origin: the facility itself, the coordinator's check, or none (nothing came back, or not in time)."""
    again: bool = False
    """True when time ran out and the same command goes on mid-round."""
    format: int = FORMAT


def output_leaves() -> bool:
    """Whether what this job prints may leave: the end of its output, and the text of errors that are not CrossFed's."""
    return os.environ.get(JOB_OUTPUT) != "0"


def text_of(error: BaseException) -> str:
    """An unexpected error as a reason may name it: by its kind alone where what is printed stays, for its text may
    quote the data."""
    return repr(error) if output_leaves() else type(error).__name__


def write(directory: Path, message: Report | Failure) -> None:
    """Write report.json or failure.json into `directory`, atomically.

    A failure's words may name a file whose name is not UTF-8: its bytes are written as `\\udcXX`. And they may be a
    library's, which names an address with the login that the site has given it: that is left out.
    """
    values = asdict(message)
    if isinstance(message, Failure):
        words = {name: values[name].encode(errors="backslashreplace").decode() for name in ("reason", "log_tail")}
        values |= {name: hidden_login(text) for name, text in words.items()}
    write_json(Path(directory) / (REPORT if isinstance(message, Report) else FAILURE), values)


def read_report(directory: Path) -> Report:
    """Raises `ManifestError` unless report.json is there and every field has its type and a possible value."""
    path = Path(directory) / REPORT
    found = read_message(path, Report, newest=FORMAT, most_bytes=MOST_BYTES)
    seconds = found.inside("seconds").only_of(Seconds)
    versions = found.inside("versions", 200)
    return Report(
        federation=found.text("federation"),
        facility=found.text("facility"),
        round=found.whole("round", most=MOST_ROUNDS),
        samples=found.whole("samples", most=MOST_COUNT),
        tokens=found.whole("tokens", most=MOST_COUNT),
        steps=found.whole("steps", most=MOST_COUNT),
        loss_received=found.number("loss_received", most=MOST_LOSS),
        loss_returned=found.number("loss_returned", most=MOST_LOSS),
        perplexity_received=found.number("perplexity_received", most=MOST_PERPLEXITY),
        perplexity_returned=found.number("perplexity_returned", most=MOST_PERPLEXITY),
        training_loss=found.number("training_loss", least=-MOST_LOSS, most=MOST_LOSS),
        seconds=Seconds(**{one.name: seconds.number(one.name, 0.0, most=1e9) for one in fields(Seconds)}),
        tokens_per_second=found.number("tokens_per_second", 0.0, most=MOST_COUNT),
        peak_memory_bytes=found.whole("peak_memory_bytes", 0),
        seed=found.whole("seed", 0, least=-(2**63), most=2**64),
        position=found.whole("position", 0),
        ranks=found.whole("ranks", 1, most=10**7),
        devices=found.items("devices", 10**5, Fields.text),
        versions={name: versions.text(name) for name in versions.raw},
        details=found.mapping("details", 1000),
        format=found.whole("format", FORMAT, least=1, most=FORMAT),
    )


def skipped_of(report: Report) -> int:
    """How many of its steps moved nothing; a trainer of one's own may not say."""
    return _count(report, STEPS_SKIPPED)


def predicted_memory_of(report: Report) -> int:
    """The memory that the facility's largest rank was expected to need; 0: it says nothing that can be used."""
    return _count(report, PREDICTED_MEMORY)


def _count(report: Report, key: str) -> int:
    """A whole number above 0 among the details; 0 where there is none, or one that cannot be."""
    value = report.details.get(key)
    return value if type(value) is int and 0 < value <= MOST_COUNT else 0


def task_reported(report: Report) -> str:
    """What the losses are of; '': it says nothing that is known."""
    task = report.details.get(TASK)
    return task if isinstance(task, str) and task in KNOWN else ""


def accuracies(*, received: float | None, returned: float | None = None) -> dict[str, float]:
    """Entries of `details`, of the figures that there are."""
    pairs = zip(ACCURACIES, (received, returned), strict=True)
    return {name: value for name, value in pairs if value is not None}


def accuracies_of(report: Report) -> tuple[float | None, float | None]:
    """The accuracy of the received and the returned model; None: not reported, or outside 0 to 1."""
    received, returned = (_share(report.details.get(name)) for name in ACCURACIES)
    return received, returned


def _share(value: object) -> float | None:
    """A number between 0 and 1; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= 1 else None


def read_failure(directory: Path) -> Failure | None:
    """The failure that an update directory reports, or None. Its reason and log are cleaned for a person to read.

    Raises `ManifestError` where failure.json is malformed. Whose it is and of which round is for the reader to check.
    """
    path = Path(directory) / FAILURE
    if not os.path.lexists(path):
        return None
    found = read_message(path, Failure, newest=FORMAT, most_bytes=MOST_BYTES)
    return Failure(
        facility=found.text("facility"),
        round=found.whole("round", most=MOST_ROUNDS),
        reason=found.words("reason", "no reason given", longest=MOST_REASON) or "no reason given",
        log_tail=found.words("log_tail", "", longest=MOST_LOG, lines=True),
        kind=found.one_of("kind", "failed", ("failed", "refused", "absent", "late")),
        again=found.flag("again", False),
        format=found.whole("format", FORMAT, least=1, most=FORMAT),
    )
