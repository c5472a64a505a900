"""Do the patterns of federation.yml mean tensors that there are? One that is misspelt keeps nothing at a facility."""

from __future__ import annotations

import dataclasses

from coordinator.config.federation import Federation
from coordinator.memory.figures import ModelFigures, in_update, model_figures
from coordinator.preflight.row import ME, Row, fail, ok, warning
from facility.exchange.checkpoints.adapters import is_adapter
from facility.exchange.checkpoints.checkpoint import FLOATS
from facility.exchange.checkpoints.patterns import matches_any
from facility.exchange.errors import InputError
from facility.exchange.messages.layout import of_adapters
from facility.exchange.messages.settings import TrainingSettings

CHECK = "patterns"


def check_patterns(federation: Federation) -> list[Row]:
    """Rows on `aggregation.include` and `exclude`, and on each `training.freeze`; none where there are no patterns, or
    where the model cannot be read, which another check says."""
    aggregation = federation.aggregation
    given = {"aggregation.include": aggregation.include, "aggregation.exclude": aggregation.exclude}
    for one in federation.facilities:
        given[f"training.freeze of {one.name}"] = one.training.freeze
    if not any(given.values()):
        return []
    try:
        figures = model_figures(federation.path(federation.model))
    except InputError:
        return []
    averaged = _averaged(federation, figures)
    names = [*figures.shapes, *(name for name in averaged if name not in figures.shapes)]
    rows = [
        warning(
            ME,
            CHECK,
            f"{key}: {pattern!r} matches no tensor of the model",
            f"correct or remove it; tensors have names such as {names[0]}"
            + ("; what it was to keep at the facilities is sent" if key == "aggregation.exclude" else ""),
        )
        for key, patterns in given.items()
        for pattern in patterns
        if names and not any(matches_any(name, [pattern]) for name in names)
    ]
    if averaged and not any(map(aggregation.federated.federated, averaged)):
        found = "aggregation.include and exclude leave no tensor to average"
        rows.append(fail(ME, CHECK, found, f"let them leave some; tensors have names such as {averaged[0]}"))
    for one in federation.facilities:
        trained, frozen = _frozen(one.training, figures)
        if frozen and len(frozen) == len(trained):
            found = f"training.freeze of {one.name} leaves no parameter to train, so that its jobs would end at once"
            rows.append(fail(ME, CHECK, found, "freeze fewer"))
        elif frozen and one.training.lora.rank:
            found = f"training.freeze of {one.name} {of_adapters(frozen)}"
            rows.append(fail(ME, CHECK, found, "leave it out, and name training.lora.targets"))
    return rows or [ok(ME, CHECK, "each matches some tensor")]


def _frozen(training: TrainingSettings, figures: ModelFigures) -> tuple[list[str], list[str]]:
    """All that would be trained but for `freeze`, and what that matches of it; of adapters, by the names that they have
    in peft's model."""
    names = [name for name, _ in figures.trained_tensors(dataclasses.replace(training, freeze=[]))]
    within = [f"{name.removesuffix('weight')}default.weight" if is_adapter(name) else name for name in names]
    return within, [name for name in within if matches_any(name, training.freeze)]


def _averaged(federation: Federation, figures: ModelFigures) -> list[str]:
    """Names of the tensors that updates hold, and of which a mean can be taken."""
    found: dict[str, None] = {}
    for one in federation.facilities:
        if one.training.lora.rank:
            found |= dict.fromkeys(in_update(name, one.training) for name, _ in figures.trained_tensors(one.training))
        else:
            found |= dict.fromkeys(name for name, dtype in figures.dtypes.items() if dtype in FLOATS)
    return list(found)
