"""What each task counts and what its loss is called: the words of logs, tables, reports and cards, in one place.

Messages and files keep `tokens` and `perplexity` (the exponential of the loss) for every task; only what a person reads
is put in the task's own words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from facility.exchange.perplexity import perplexity

Task = Literal["causal-lm", "chat", "preference", "masked-lm", "classification", "image-classification"]
"""What `facility.prepare --task` prepares a dataset for."""
TEXT_TASKS: tuple[Task, ...] = tuple(task for task in get_args(Task) if task != "image-classification")
OWN = "own"
"""In a report: the losses are of something else, which its own trainer alone knows."""


@dataclass(frozen=True, kw_only=True)
class TaskWords:
    """The words of one task."""

    unit: str
    """What it was trained on, in the plural."""
    each: str
    """What a loss in nats is the mean over."""
    metric: str
    """What is shown of a validation loss."""
    exponential: bool = False
    """True if exp(loss) is shown."""
    by_row: bool = False
    """True if rows of the dataset are counted, and not their tokens."""
    live_unit: str = "tokens"
    """Unit of a running job's speed, which is reported before its rows are counted."""
    hub_task: str = "text-generation"
    """Hugging Face's name of the task."""

    def figure(self, perplexity: float | None) -> float | None:
        """What is shown for the reported perplexity `perplexity`; None: unknown, or not a possible perplexity."""
        if perplexity is None or self.exponential:
            return perplexity
        return math.log(perplexity) if perplexity > 0 else None

    def text(self, perplexity: float | None) -> str:
        """The figure in digits; '-' where nothing is known."""
        value = self.figure(perplexity)
        if value is None:
            return "-"
        if not self.exponential:
            return f"{value:.4f}"
        return f"{value:.3f}" if value < 1e9 else f"{value:.3g}"

    def of_loss(self, loss: float) -> str:
        """A loss in nats for a log."""
        return f"loss {loss:.4f}" + (f", perplexity {perplexity(loss):.2f}" if self.exponential else "")

    def count(self, row: Mapping[str, Any]) -> int:
        """What one row of rounds, or a sum of rows, was trained on."""
        return int(row.get("samples", 0) if self.by_row else row["tokens"])

    def speed(self, row: Mapping[str, Any]) -> float:
        """What the task counts by, per second; 0: not known."""
        speed = float(row.get("tokens_per_second", 0.0))
        if not self.by_row:
            return speed
        return speed * row.get("samples", 0) / row["tokens"] if row["tokens"] else 0.0

    @property
    def nats(self) -> str:
        return f"nats per {self.each}"

    @property
    def mean(self) -> str:
        """The mean over facilities whose logarithm, or which itself, is the mean of their losses."""
        return "geometric mean" if self.exponential else "mean"


TEXT = TaskWords(unit="tokens", each="token", metric="perplexity", exponential=True)
WORDS: Mapping[str, TaskWords] = {
    "causal-lm": TEXT,
    "chat": TEXT,
    "masked-lm": TaskWords(
        unit="tokens", each="hidden token", metric="perplexity", exponential=True, hub_task="fill-mask"
    ),
    "preference": TaskWords(unit="pairs", each="pair", metric="DPO loss", by_row=True),
    "classification": TaskWords(
        unit="examples", each="example", metric="loss", by_row=True, hub_task="text-classification"
    ),
    "image-classification": TaskWords(
        unit="images",
        each="image",
        metric="loss",
        by_row=True,
        live_unit="images",
        hub_task="image-classification",
    ),
    OWN: TaskWords(unit="tokens", each="prediction", metric="loss"),
}
"""What is said of each task."""
KNOWN = (*get_args(Task), OWN)


def words_of(task: str) -> TaskWords:
    """The words of a task; those of text where none is named, as in files of earlier versions."""
    return WORDS.get(task, TEXT)


def capitalise(text: str) -> str:
    """With a capital first letter, the rest as it is."""
    return text[:1].upper() + text[1:]
