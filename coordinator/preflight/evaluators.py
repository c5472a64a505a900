"""Whether what evaluates models on tasks, and the experiment trackers, are installed where they are asked for."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from coordinator.config.federation import Federation
from coordinator.preflight.row import ME, Row, ok, warning
from facility.exchange.messages.strict_json import clean_text

TASKS, TRACKERS = "tasks", "trackers"
EVALUATOR = "lm_eval"


def check_tasks(federation: Federation, name: str, optional: Mapping[str, str | None] | None) -> list[Row]:
    """Whether a facility that evaluates on tasks has lm-eval; no row for others, or where that is not reported.

    `optional`: what its probe said of packages that only some settings need. A warning: an evaluation that fails costs
    the round nothing but the scores.
    """
    plan = federation.evaluation.for_facility(name, masked=bool(federation.masks))
    if not plan.tasks or optional is None or EVALUATOR not in optional:
        return []
    if (version := optional[EVALUATOR]) is None:
        found = f"evaluation.tasks are evaluated at {name}, which has no lm-eval: there would be no scores"
        return [warning(name, TASKS, found, "pip install lm-eval in the facility's environment")]
    return [ok(name, TASKS, f"lm-eval {clean_text(str(version), 40)} is installed there")]


def check_own_evaluators(federation: Federation) -> list[Row]:
    """Rows of the coordinator on the trackers that it feeds and on tasks that it evaluates itself."""
    rows = []
    own = federation.evaluation.for_coordinator(federation.names)
    if own is not None and importlib.util.find_spec(EVALUATOR) is None:
        found = "evaluation.facility is coordinator, and there is no lm-eval here: there would be no scores"
        rows.append(warning(ME, TASKS, found, "pip install lm-eval in the coordinator's environment"))
    if federation.trackers:
        rows.append(_trackers(federation.trackers))
    return rows


def _trackers(names: list[str]) -> Row:
    """A warning for a name that accelerate does not know, or whose package is not installed: it would not be fed."""
    try:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    except ImportError as error:
        return warning(ME, TRACKERS, f"trackers cannot be fed: {error}", "pip install accelerate here")
    known, here = sorted(LOGGER_TYPE_TO_CLASS), [str(getattr(one, "value", one)) for one in get_available_trackers()]
    if unknown := [name for name in names if name not in known]:
        fix = f"correct `trackers:`, expected some of {', '.join(known)}"
        return warning(ME, TRACKERS, f"accelerate knows no tracker {', '.join(unknown)}: it would not be fed", fix)
    if absent := [name for name in names if name not in here]:
        found = f"not installed here: {', '.join(absent)}; it would not be fed"
        return warning(ME, TRACKERS, found, "install its package in the coordinator's environment, or leave it out")
    return ok(ME, TRACKERS, f"{', '.join(names)} can be fed")
