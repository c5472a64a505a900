"""The matrix of data and models as the report shows it, from what the facilities found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.archive.rounds import Archive
from coordinator.comparison.account import Account, read_account
from coordinator.comparison.candidates import last_models_sentence
from coordinator.shown_text import safe_line
from facility.exchange.messages.comparison import (
    ALONE_OF,
    GLOBAL,
    INITIAL,
    LAST_OF,
    METHOD,
    UPDATE_OF,
    Interval,
    perplexity_interval,
)
from facility.exchange.messages.evaluation import HELD_OUT
from facility.exchange.task_words import TEXT, TaskWords, capitalise
from facility.exchange.text import number_of

TITLES = {INITIAL: "initial", GLOBAL: "global"}
MASKED = (
    "Models of single facilities are there in the rows of their own data alone: with privacy.secure_aggregation nobody "
    "but the facility has seen them, and it evaluated them itself."
)
OWN_UPDATE, TRAINED_ALONE = "its own last update", "training alone"
"""What a facility has of its own to compare the global model with."""
LEAST_BLOCKS = 6
"""Of fewer validation blocks no two models are told apart, whatever an interval of resamples says: of two models that
are alike, one is better on each of five blocks in 1 case of 16, and of a single block an interval is a point."""
SHADES = "; the stronger the colour, the better within its row"
"""Of the caption: for a matrix that is drawn."""
Row = dict[str, Any]


def title_of_mean(count: int) -> str:
    """The title of the mean of the last `count` models."""
    return f"mean of the last {count}"


def title(folder: str) -> str:
    """What a reader calls a model."""
    if folder in TITLES:
        return TITLES[folder]
    prefix = next(prefix for prefix in (UPDATE_OF, ALONE_OF, LAST_OF) if folder.startswith(prefix))
    name = folder.removeprefix(prefix)
    if prefix == LAST_OF:
        return title_of_mean(int(name))
    return f"{name}'s update" if prefix == UPDATE_OF else f"{name} alone"


def matrix(archive: Archive, settings: Mapping[str, Any], names: Sequence[str], words: TaskWords = TEXT) -> Row:
    """The matrix, or {} before a facility has found anything. `settings`: of the report; `words`: of its task."""
    account = read_account(archive) if archive.path.is_dir() else None
    if account is None or not any(account.figures.values()):
        return {}
    held_out = _held_out_name(settings)
    cells = [
        cell
        for name in names
        for one in account.figures.get(name, [])
        if (cell := _cell(name, one, held_out)) is not None
    ]
    averaged = sorted({one["model"] for own in account.figures.values() for one in own if _is_mean(one["model"])})
    singles = [f"{prefix}{name}" for prefix in (UPDATE_OF, ALONE_OF) for name in names]
    order = [INITIAL, GLOBAL, *averaged, *singles]
    models = [title(folder) for folder in order if any(one["model"] == title(folder) for one in cells)]
    data = list(dict.fromkeys(one["data"] for one in sorted(cells, key=lambda one: one["held_out"])))
    return {
        "data": data,
        "models": models,
        "cells": cells,
        "tasks": [
            {"facility": name, **one, "model": title(one["model"])}
            for name in names
            for one in account.tasks.get(name, [])
        ],
        "summary": [*_summary(account.figures), *_chosen(account, averaged)],
        "verdicts": [line for name in names for line in _verdicts(name, account.figures.get(name, []), words.nats)]
        + [line for name in names for line in forgotten(account.figures.get(name, []), held_out, words.nats)],
        "gaps": {name: safe_line(reason) for name, reason in account.gaps.items()},
        "alone": _alone(account),
        "complete": account.over,
        "method": METHOD,
        "caption": _caption(
            masked=bool((settings.get("privacy") or {}).get("secure_aggregation")),
            whole=any(one["model"] == title(INITIAL) for one in cells),
            averaged=bool(averaged),
            words=words,
        ),
    }


def _is_mean(folder: str) -> bool:
    return folder.startswith(LAST_OF)


def _chosen(account: Account, averaged: Sequence[str]) -> list[str]:
    """What came of the mean of the last models."""
    return [line for folder in averaged if (line := last_models_sentence(account, int(folder.removeprefix(LAST_OF))))]


def _caption(*, masked: bool, whole: bool, averaged: bool, words: TaskWords) -> str:
    """`masked`: models of single facilities were evaluated by themselves alone; `whole`: more than candidates for the
    final model were compared; `averaged`: the mean of the last models was."""
    models = ["the mean of the last models"] if averaged else []
    if whole:
        models = ["the initial model", *models, "every facility's own last update"]
        models.append(f"models trained alone for as many {words.unit}")
    shown = f"{', '.join(models)}, and the global model"
    text = (
        f"{capitalise(words.metric)} on each facility's validation data (rows) of {shown}{SHADES}. Intervals: {METHOD}."
    )
    return f"{text} {MASKED}" if masked and whole else text


def _held_out_name(settings: Mapping[str, Any]) -> str:
    plan = settings.get("evaluation") or {}
    held_out = plan.get("held_out") or {}
    return str((settings.get("comparison") or {}).get("held_out_name") or held_out.get("name") or HELD_OUT)


def _data(name: str, figure: Row, held_out: str) -> str:
    return held_out if figure["held_out"] else name


def _interval(raw: Mapping[str, float]) -> Interval:
    return Interval(value=raw["value"], low=raw["low"], high=raw["high"])


def _cell(name: str, figure: Row, held_out: str) -> Row | None:
    found = perplexity_interval(_interval(figure["loss"]))
    if found is None:
        return None
    against = {title(folder): [one["value"], one["low"], one["high"]] for folder, one in figure["against"].items()}
    return {
        "data": _data(name, figure, held_out),
        "facility": name,
        "held_out": figure["held_out"],
        "model": title(figure["model"]),
        "perplexity": found[0],
        "interval": [found[1], found[2]],
        "blocks": figure["blocks"],
        "predictions": figure["predictions"],
        "loss_less": against,
    }


def _against_own(name: str, figures: Sequence[Row]) -> dict[str, Mapping[str, float]]:
    """By what a facility has of its own: how the global model's loss on its data differs from that one's."""
    own = {one["model"]: one for one in figures if not one["held_out"]}
    found: dict[str, Mapping[str, float]] = {}
    for folder, what in ((f"{UPDATE_OF}{name}", OWN_UPDATE), (f"{ALONE_OF}{name}", TRAINED_ALONE)):
        if (one := own.get(folder)) is not None and (less := one["against"].get(GLOBAL)) is not None:
            found[what] = _negated(less) | {"blocks": one["blocks"]}
    return found


def _verdicts(name: str, figures: Sequence[Row], nats: str) -> list[str]:
    """In sentences: the global model against this facility's own ones."""
    differences = _against_own(name, figures).items()
    return [f"{name}: on its data the global model is {_compared(less, what, nats)}." for what, less in differences]


def forgotten(figures: Sequence[Row], held_out: str, nats: str = TEXT.nats) -> list[str]:
    """Sentences that compare the global model with the initial one on held-out data."""
    found = {one["model"]: one for one in figures if one["held_out"]}
    against = {model: one["against"] for model, one in found.items()}
    if (own := against.get(GLOBAL, {}).get(INITIAL)) is not None:
        less = dict(own) | {"blocks": found[GLOBAL]["blocks"]}
    elif (more := against.get(INITIAL, {}).get(GLOBAL)) is not None:
        less = _negated(more) | {"blocks": found[INITIAL]["blocks"]}
    else:
        return []
    return [
        f"{held_out}, which no facility trained on: the global model is {_compared(less, 'the initial one', nats)}."
    ]


def _summary(figures: Mapping[str, Sequence[Row]]) -> list[str]:
    """On the data of how many facilities the global model is better or worse than their own ones."""
    differences = [_against_own(name, own) for name, own in figures.items()]
    lines = []
    for what in (TRAINED_ALONE, OWN_UPDATE):
        found = [_direction(one[what]) for one in differences if what in one]
        if found:
            counts = ", ".join(f"{words} at {found.count(words)}" for words in ("better", "worse", "not told apart"))
            noun = "facility" if len(found) == 1 else "facilities"
            lines.append(f"The global model against {what}, on the data of {len(found)} {noun}: {counts}.")
    return lines


def _direction(less: Mapping[str, float]) -> str:
    if less["blocks"] < LEAST_BLOCKS or less["low"] <= 0 <= less["high"]:
        return "not told apart"
    return "worse" if less["low"] > 0 else "better"


def _negated(less: Mapping[str, float]) -> dict[str, float]:
    return {"value": -less["value"], "low": -less["high"], "high": -less["low"]}


def _compared(less: Mapping[str, float], what: str, nats: str) -> str:
    """A difference of losses to the model `what`, in words and in `nats`."""
    ends = f"[{less['low']:+.4f}, {less['high']:+.4f}]"
    words = _direction(less)
    joined = f"{words} from {what}" if words == "not told apart" else f"{words} than {what}"
    blocks = int(less["blocks"])
    few = "" if blocks >= LEAST_BLOCKS else f", of {number_of(blocks, 'validation block')}: too few to tell"
    return f"{joined}: {less['value']:+.4f} {nats} {ends}{few}"


def _alone(account: Account) -> dict[str, Row]:
    return {
        name: {"rounds": one.rounds, "of": one.of, "tokens": one.tokens, "reason": safe_line(one.reason)}
        for name, one in account.alone.items()
    }
