"""What follows the last round where models are compared: two further kinds of model directory, and what comes back.

`models`: a directory of several models, one folder each, for a facility to evaluate on its own validation data.
`alone`: the order to train alone for one more round, from the initial model, which it contains where needed.
Both are named by the manifest's `kind`, so that they are signed, verified and staged as any model is. With secure
aggregation a facility's own models stay with it: it evaluates them in place, and only figures leave.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from facility.exchange.errors import ManifestError
from facility.exchange.messages.evaluation import MOST_SCORES, SCORE, score_of
from facility.exchange.messages.manifest import Manifest, read_manifest, with_extra
from facility.exchange.messages.plausible import MOST_COUNT, MOST_LOSS, MOST_ROUNDS
from facility.exchange.messages.steps import are_possible
from facility.exchange.messages.strict_json import Fields

MODELS, ALONE = "models", "alone"
"""Kinds of manifest beside `model` and `update`."""
SENT = ("model", MODELS, ALONE)
"""Kinds that a coordinator sends."""
GLOBAL, INITIAL = "global", "initial"
"""Folders of the final global model, in every directory of models, and of the initial one."""
UPDATE_OF, ALONE_OF = "update.", "alone."
"""A facility's own last update that counted, and the model that it trained alone: with its name behind."""
LAST_OF = "last."
"""The mean of the global models of the last rounds: with their number behind."""
FOLDERS = "models"
"""In the `extra` of a directory of models: its folders, in the order in which they are evaluated."""
ROUNDS = "alone_rounds"
"""In the `extra` of an order to train alone: rounds to train in all, by facility."""
STEPS = "alone_steps"
"""In the `extra` of such an order: by facility, the steps of each of these rounds, as its updates took them. Absent:
those of its settings."""
OWN = "own_models"
"""In the `extra` of a directory of models: by facility, which models of its own it is to evaluate at its own place."""
KEY = "comparison"
"""In the `extra` of what comes back."""
RESAMPLES, LEVEL = 1000, 0.95
METHOD = (
    f"{LEVEL:.0%} percentile intervals of {RESAMPLES} bootstrap resamples of validation blocks, drawn at the facility "
    "with a fixed seed and alike for all models"
)
MOST_FIGURES = 10_000


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A figure with the ends of its bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One model on one data set."""

    model: str
    """Folder of the model."""
    held_out: bool = False
    """True on the held-out data, false on the facility's own validation data."""
    loss: Interval
    """Mean over predictions, nats."""
    blocks: int
    """Validation blocks, which are what is resampled."""
    predictions: int
    against: dict[str, Interval] = dataclasses.field(default_factory=dict)
    """Loss less that of the global and of the initial model, over the same resamples; where those are known."""


@dataclass(frozen=True, kw_only=True)
class Alone:
    """How far a facility is with training alone."""

    rounds: int
    of: int
    tokens: int
    """Trained on in all these rounds."""


@dataclass(frozen=True, kw_only=True)
class OwnModels:
    """Models that stay at a facility; it evaluates them beside those that it is sent."""

    update: int | None = None
    """Round of its last update that counted; None: none did."""
    alone: int = 0
    """Rounds that it trained alone; 0: no such model is compared."""

    def folders(self, facility: str) -> list[str]:
        """What they are called among the models."""
        names = {f"{UPDATE_OF}{facility}": self.update is not None, f"{ALONE_OF}{facility}": self.alone > 0}
        return [name for name, wanted in names.items() if wanted]


def with_figures(directory: Path, figures: Sequence[Figure]) -> None:
    """Write the figures into the manifest of `directory`."""
    with_extra(directory, KEY, {"figures": [dataclasses.asdict(one) for one in figures]})


def with_tasks(directory: Path, scores: Sequence[Mapping[str, Any]]) -> None:
    """Add scores on tasks (model, task, metric, value, stderr) to the figures in the manifest of `directory`."""
    found = read_manifest(directory).extra.get(KEY) or {}
    with_extra(directory, KEY, found | {"tasks": [*found.get("tasks", []), *map(dict, scores)]})


def with_missing(directory: Path, missing: Mapping[str, str]) -> None:
    """Add to the figures in the manifest of `directory` why models have none."""
    found = read_manifest(directory).extra.get(KEY) or {}
    with_extra(directory, KEY, found | {"missing": found.get("missing", {}) | dict(missing)})


def with_alone(directory: Path, alone: Alone) -> None:
    """Write how far training alone is into the manifest of `directory`."""
    with_extra(directory, KEY, {"alone": dataclasses.asdict(alone)})


def folders_of(manifest: Manifest) -> list[str]:
    """Folders of a directory of models. Raises `ManifestError` for one without, or with a name that is a path."""
    found = manifest.extra.get(FOLDERS)
    if not isinstance(found, list) or GLOBAL not in found or not all(_plain(one) for one in found):
        raise ManifestError(f"a directory of models names its folders in {FOLDERS}, expected plain names with {GLOBAL}")
    return found


def _plain(name: Any) -> bool:
    return isinstance(name, str) and 0 < len(name) < 100 and "/" not in name and not name.startswith(".")


def own_models_of(manifest: Manifest, facility: str) -> OwnModels | None:
    """What `facility` is to evaluate at its own place; None where models travel. Raises `ManifestError`."""
    if OWN not in manifest.extra:
        return None
    listed = Fields(raw=manifest.extra, where="extra").inside(OWN)
    if facility not in listed.raw:
        return OwnModels()
    found = listed.inside(facility).only(["update", "alone"])
    update = None if found.raw.get("update") is None else found.whole("update", most=MOST_ROUNDS)
    return OwnModels(update=update, alone=found.whole("alone", 0, most=MOST_ROUNDS))


def expected_of(manifest: Manifest, facility: str) -> list[str]:
    """Every model that `facility` gives figures of: those sent, and its own. Raises `ManifestError`."""
    own = own_models_of(manifest, facility)
    return [*folders_of(manifest), *(own.folders(facility) if own is not None else [])]


def missing_of(manifest: Manifest, expected: Collection[str]) -> dict[str, str]:
    """Why a facility has no figures of models. Raises `ManifestError`."""
    missing = Fields(raw=_figures_in(manifest), where=KEY).inside("missing", len(expected))
    missing.only(list(expected))
    return {name: missing.words(name, "", longest=500) for name in missing.raw}


def rounds_alone(manifest: Manifest, facility: str) -> int:
    """Rounds that `facility` is to train alone in all. Raises `ManifestError`."""
    return Fields(raw=manifest.extra.get(ROUNDS) or {}, where=ROUNDS).whole(facility, 0, most=MOST_ROUNDS)


def steps_alone(manifest: Manifest, facility: str, done: int, *, most: int) -> int | None:
    """Steps of the round that follows `done` rounds alone; None where none are asked for, or none that the facility
    agreed to: `most`, by its settings."""
    listed = manifest.extra.get(STEPS)
    own = listed.get(facility) if isinstance(listed, dict) else None
    steps = own[done] if isinstance(own, list) and done < len(own) else None
    return steps if are_possible(steps, most) else None


def figures_of(manifest: Manifest, expected: Collection[str]) -> list[Figure]:
    """What a facility found of the models in the folders `expected`. Raises `ManifestError` for anything else."""
    found = Fields(raw=_figures_in(manifest), where=KEY).only(["figures", "tasks", "missing"])
    return found.items("figures", MOST_FIGURES, lambda fields, key: _figure(fields.inside(key), expected))


def _figure(found: Fields, expected: Collection[str]) -> Figure:
    found.only_of(Figure)
    model = found.one_of("model", "", expected)
    against = found.mapping("against", 2)
    if strange := set(against) - {GLOBAL, INITIAL}:
        raise ManifestError(f"{found.where} compares with {sorted(strange)}, expected {GLOBAL} and {INITIAL}")
    pairs = Fields(raw=against, where=f"{found.where}: against")
    return Figure(
        model=model,
        held_out=found.flag("held_out", False),
        loss=_interval(found.inside("loss"), least=0.0),
        blocks=found.whole("blocks", least=1, most=MOST_COUNT),
        predictions=found.whole("predictions", least=1, most=MOST_COUNT),
        against={name: _interval(pairs.inside(name), least=-MOST_LOSS) for name in against},
    )


def _interval(found: Fields, least: float) -> Interval:
    found.only(["value", "low", "high"])
    value, low, high = (found.number(name, least=least, most=MOST_LOSS) for name in ("value", "low", "high"))
    if not low <= high:
        raise ManifestError(f"{found.where} is an interval from {low:g} to {high:g}")
    return Interval(value=value, low=low, high=high)


def tasks_of(manifest: Manifest, expected: Collection[str]) -> list[dict[str, Any]]:
    """Scores of the models on tasks: model, task, metric, value, stderr. Raises `ManifestError`."""
    found = Fields(raw=_figures_in(manifest), where=KEY)
    return found.items("tasks", MOST_SCORES, lambda fields, key: _score(fields.inside(key), expected))


def _score(found: Fields, expected: Collection[str]) -> dict[str, Any]:
    found.only(["model", *SCORE])
    return {"model": found.one_of("model", "", expected)} | score_of(found, of_data=True)


def alone_of(manifest: Manifest) -> Alone:
    """How far a facility says that it is. Raises `ManifestError`."""
    found = Fields(raw=_figures_in(manifest), where=KEY).only(["alone"]).inside("alone").only_of(Alone)
    alone = Alone(
        rounds=found.whole("rounds", most=MOST_ROUNDS),
        of=found.whole("of", most=MOST_ROUNDS),
        tokens=found.whole("tokens", most=MOST_COUNT),
    )
    if alone.rounds > alone.of:
        raise ManifestError(f"{found.where} is {alone.rounds} rounds of {alone.of}")
    return alone


def _figures_in(manifest: Manifest) -> dict[str, Any]:
    found = manifest.extra.get(KEY)
    if not isinstance(found, dict):
        raise ManifestError(f"the manifest has no {KEY}: expected figures, or rounds trained alone")
    return found


def perplexity_interval(loss: Interval) -> tuple[float, float, float] | None:
    """Perplexity and its interval; None where they are too large to show."""
    return None if loss.high > 700 else (math.exp(loss.value), math.exp(loss.low), math.exp(loss.high))
