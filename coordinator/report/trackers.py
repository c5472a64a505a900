"""Curves of a federation for experiment trackers, fed by the coordinator: facilities need no package and no internet.

By name through accelerate's trackers (huggingface.co/docs/accelerate, usage_guides/tracking): `tensorboard`, `mlflow`,
`wandb` and what else is installed. Each complete round is one step of one run per facility and of one for the global
model.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.archive.rounds import FacilityRow, RoundFile
from coordinator.archive.task import task_of_rows
from facility.exchange.messages.loss_curve import mean_of
from facility.exchange.task_words import TaskWords, words_of

FOLDER = "trackers"
"""In the archive: where trackers that write files write them."""
OFFLINE = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
"""Unless the environment says otherwise."""


def curves(entry: RoundFile) -> dict[str, dict[str, float]]:
    """Figures of one round by run: `global`, and each facility that took part."""
    words = words_of(task_of_rows(entry.facilities))
    series: dict[str, dict[str, float | None]] = {
        "global": {
            "loss_received": entry.global_loss,
            words.unit: float(sum(words.count(dataclasses.asdict(row)) for row in entry.facilities)),
            "facilities": float(sum(row.status == "ok" for row in entry.facilities)),
            "update_norm": entry.aggregation.get("mean_norm"),
            "step_norm": entry.aggregation.get("step_norm"),
        }
    }
    series |= {row.facility: _of_facility(row, words) for row in entry.facilities if row.status == "ok"}
    return {
        name: {key: value for key, value in figures.items() if value is not None and math.isfinite(value)}
        for name, figures in series.items()
    }


def _of_facility(row: FacilityRow, words: TaskWords) -> dict[str, float | None]:
    return {
        "loss_received": row.loss_received,
        "loss_returned": row.loss_returned,
        "loss_training": mean_of(row.training_losses, row.steps),
        "weight": row.weight,
        words.unit: float(words.count(dataclasses.asdict(row))),
        f"{words.unit}_per_second": words.speed(dataclasses.asdict(row)) or None,
        "seconds": row.seconds or None,
        "energy_joules": row.usage.get("energy_joules"),
    }


def track_round(archive: Path, federation: str, names: Sequence[str], entry: RoundFile) -> list[str]:
    """Log a complete round with every tracker; returns why some could not. No tracker ends a round."""
    problems = []
    for name in names:
        try:
            _log(name, archive / FOLDER, federation, entry)
        except Exception as error:  # a tracker is another package's code, and what it does is not the round's business
            problems.append(f"tracker {name} was not fed: {type(error).__name__}: {str(error)[:200]}")
    return problems


def _log(name: str, folder: Path, federation: str, entry: RoundFile) -> None:
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState(cpu=True)  # accelerate's own log messages, which its trackers write, ask for it
    if name not in LOGGER_TYPE_TO_CLASS:
        raise ValueError(f"expected one of {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}")
    kind = LOGGER_TYPE_TO_CLASS[name]
    folder.mkdir(parents=True, exist_ok=True)
    for run, figures in curves(entry).items():
        title = re.sub(r"[^A-Za-z0-9_.-]", "-", f"{federation}-{run}")
        with _environment(OFFLINE | {"MLFLOW_TRACKING_URI": f"sqlite:///{(folder / 'mlflow.db').absolute()}"}):
            tracker = kind(**_arguments(name, title, folder))
            if hasattr(tracker, "start"):
                tracker.start()
            tracker.log(figures, step=entry.round)
            tracker.finish()


def _arguments(name: str, run: str, folder: Path) -> dict[str, Any]:
    """Each tracker's arguments that keep all rounds in one run."""
    if name == "wandb":
        return {"run_name": "crossfed", "id": run, "name": run, "resume": "allow", "dir": str(folder)}
    if name == "mlflow":
        artifacts = (folder / "mlflow").absolute().as_uri()
        return {"experiment_name": run, "run_name": run, "run_id": _mlflow_run(run), "logging_dir": artifacts}
    return {"run_name": run, "logging_dir": str(folder)}


def _mlflow_run(run: str) -> str | None:
    """Identifier of the run that earlier rounds are in; None before the first."""
    import mlflow

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", run)
    experiment = mlflow.get_experiment_by_name(name)
    if experiment is None:
        return None
    wanted = f"attributes.run_name = '{run}'"
    found = mlflow.MlflowClient().search_runs(
        [experiment.experiment_id], wanted, order_by=["attributes.start_time ASC"], max_results=1
    )
    return found[0].info.run_id if found else None


@contextmanager
def _environment(defaults: Mapping[str, str]):
    """The defaults for variables that are not set, inside the block."""
    added = {key: value for key, value in defaults.items() if key not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for key in added:
            os.environ.pop(key, None)
