"""All schedulers: modules of this package that define `SCHEDULER`, and entry points in group `crossfed.schedulers`.

An entry point names a `Scheduler` instance of another package; one of the same name replaces the built-in.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys
from functools import cache
from typing import Any

import coordinator.schedulers as package
from coordinator.schedulers.scheduler import Scheduler
from facility.exchange.errors import ConfigurationError

GROUP = "crossfed.schedulers"


@cache
def schedulers() -> dict[str, Scheduler]:
    """The schedulers by the name that `deployment.type` has."""
    found: dict[str, Scheduler] = {}
    for module in pkgutil.iter_modules(package.__path__):
        one = getattr(importlib.import_module(f"{package.__name__}.{module.name}"), "SCHEDULER", None)
        if one is not None:
            found[one.name] = one
    for entry in importlib.metadata.entry_points(group=GROUP):
        one = entry.load()
        if not isinstance(one, Scheduler):
            raise ConfigurationError(
                f"entry point {entry.value!r} of {GROUP} is a {type(one).__name__}, expected a "
                "coordinator.schedulers.scheduler.Scheduler"
            )
        found[one.name] = one
    return found


def describe_schedulers() -> list[dict[str, Any]]:
    """Each one's `deployment.type` and the first line of its module, which names its manual, for documentation."""
    return [
        {
            "name": name,
            "summary": one.title,
            "parameters": [],
            "citation": (sys.modules[type(one).__module__].__doc__ or "").partition("\n")[0],
        }
        for name, one in sorted(schedulers().items())
    ]


def scheduler_named(name: str) -> Scheduler:
    """Raises `ConfigurationError` with the known names."""
    try:
        return schedulers()[name]
    except KeyError:
        raise ConfigurationError(f"{name!r} is not a scheduler, expected one of {', '.join(schedulers())}") from None
