"""Evaluation on tasks: what a facility is asked to evaluate, and the scores in its update's manifest."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from facility.exchange.errors import ConfigurationError, ManifestError
from facility.exchange.messages.manifest import Manifest, with_extra
from facility.exchange.messages.strict_json import Fields
from facility.exchange.text import Line
from facility.exchange.validation import AtLeastOne, NonNegative, Positive, validated

SCORES = "scores"
"""Key in a manifest's `extra`."""
VALIDATION = "validation"
"""Stands for a facility's own validation data where scores of tasks are listed; no task has this name."""
HELD_OUT = "held-out data"
"""Stands for data that no facility trains on where scores of tasks are listed; no task has this name."""
OF_DATA = (VALIDATION, HELD_OUT)
ACCURACY = "accuracy"
"""What is reported of models on such data, where they classify."""
SCORE = ("task", "metric", "value", "stderr")
"""Fields of a score."""
MOST_SCORES = 2000
MOST_VALUE = 1e9
TASK = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]*")
METRIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@%+-]*(?: \([A-Za-z0-9][A-Za-z0-9_.:-]*\))?")
"""As lm-eval calls it, and its filter in brackets: `exact_match (strict-match)`, `pass@1 (create_test)`."""


def is_due(every: int, round: int, rounds: int) -> bool:
    """True when a model is evaluated on tasks in this round: at every interval of rounds, and the final one always."""
    return round >= rounds or round % every == 0


@validated(frozen=True, kw_only=True)
class EvaluationSettings:
    """Tasks of EleutherAI's lm-eval, run on the received global model in a facility's own job, without a network."""

    tasks: list[Line] = field(default_factory=list)
    """Names of tasks; none: no evaluation on tasks."""
    every: AtLeastOne[int] = 1
    """Rounds between two evaluations; the final model is always evaluated."""
    directory: Line = ""
    """Folder at the facility with the tasks' YAML files and their local data (lm-eval's `--include_path`); empty: only
    tasks that lm-eval has, whose data must be in the facility's cache."""
    limit: NonNegative[int] = 0
    """Examples of each task; 0: all."""
    batch: AtLeastOne[int] = 8
    """Examples evaluated together."""
    minutes: Positive[int] = 60
    """After so long the evaluation is given up; the update is sent all the same."""

    def __post_init__(self) -> None:
        if odd := next((task for task in self.tasks if not TASK.fullmatch(task) or task == VALIDATION), None):
            raise ConfigurationError(f"tasks names {odd!r}, expected names of tasks such as arc_easy", key="tasks")

    def due(self, round: int, rounds: int) -> bool:
        """True when the model that this round receives is to be evaluated."""
        return bool(self.tasks) and is_due(self.every, round, rounds)


@validated(frozen=True, kw_only=True)
class FacilityEvaluation(EvaluationSettings):
    """The evaluation on tasks as one facility's settings hold it."""

    held_out: Line = ""
    """Prepared dataset at the facility that no facility trains on; empty: none."""
    own_models: bool = False
    """Keep the last update here, unmasked, to evaluate it here after the last round: masks hide it from all others."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """One figure of one task."""

    task: str
    metric: str
    """As lm-eval calls it, with its filter in brackets where there is one."""
    value: float
    stderr: float | None = None


def with_scores(update: Path, scores: Sequence[Score], problem: str = "") -> None:
    """Say in an update's manifest how the received model did; `problem`: why there are no scores."""
    entry: dict[str, Any] = {"results": [dataclasses.asdict(one) for one in scores]} | (
        {"problem": problem} if problem else {}
    )
    with_extra(update, SCORES, entry)


def scores_of(manifest: Manifest) -> dict[str, Any]:
    """`results` and perhaps `problem`, as plain data; {} where there is nothing, or nothing possible."""
    raw = manifest.extra.get(SCORES)
    if not isinstance(raw, dict):
        return {}
    try:
        found = Fields(raw=raw, where=SCORES).only(["results", "problem"])
        listed = raw.get("results", [])
        if not isinstance(listed, list) or len(listed) > MOST_SCORES:
            return {}
        problem = found.words("problem", "", longest=500)
        return {"results": [_score(one) for one in listed]} | ({"problem": problem} if problem else {})
    except ManifestError:
        return {}


def _score(raw: Any) -> dict[str, Any]:
    return score_of(Fields(raw=raw if isinstance(raw, dict) else {}, where=SCORES).only(SCORE))


def score_of(found: Fields, *, of_data: bool = False) -> dict[str, Any]:
    """The fields `SCORE` of a facility's score. Raises `ManifestError` where a name or a number is not one.

    `of_data`: it may be the accuracy on a facility's validation data or held-out data, too.
    """
    task, metric = found.text("task", longest=100), found.text("metric", longest=100)
    least, most = -MOST_VALUE, MOST_VALUE
    if of_data and task in OF_DATA:
        if metric != ACCURACY:
            raise ManifestError(f"{found.where} reports something else than {ACCURACY} of {task}")
        least, most = 0.0, 1.0
    elif task == VALIDATION:
        raise ManifestError(
            f"{found.where} names a task {VALIDATION!r}, which is what a facility's own data are called"
        )
    else:
        for name, plain, text in (("task", TASK, task), ("metric", METRIC, metric)):
            if not plain.fullmatch(text):
                raise ManifestError(f"{found.where} has a {name} that is not a name such as arc_easy or acc_norm")
    stderr = None if found.raw.get("stderr") is None else found.number("stderr", most=most)
    return {
        "task": task,
        "metric": metric,
        "value": found.number("value", least=least, most=most),
        "stderr": stderr,
    }
