"""Names of facilities that would be taken for something else: another facility, or what is made for one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from coordinator.config.deployment_names import CONNECTION, INTERFACE, LOGIN_NODE
from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.comparison import GLOBAL

MADE = {
    CONNECTION: "connection",
    INTERFACE: "connection",
    "-ahead": "jobs ahead of their model",
    LOGIN_NODE: "login commands",
}
"""What is made for a facility under its own name and a suffix: in streamflow.yml, in its queue, beside its template."""
TAKEN = ("engine", "failing-check.json", "live.json", "logins", "outputs", "queues.yml", "run.lock", "streamflow.log")
"""What a run itself makes, empties and removes in the federation's work directory, where a facility on this machine
has a folder of its own name."""


def check_names(names: Sequence[str], in_work_directory: Collection[str] = ()) -> None:
    """Raise `ConfigurationError`, with the key, for the first name that cannot stand.

    `in_work_directory`: those whose jobs run in a folder of the federation's work directory.
    """
    seen: set[str] = set()
    all_names = {name.lower() for name in names}
    for number, name in enumerate(names):
        key, lower = f"facilities[{number}].name", name.lower()
        if lower == GLOBAL:
            raise ConfigurationError(
                f"facility {name!r} has the name under which curves and tables show the global model; choose another",
                key=key,
            )
        if lower in TAKEN and name in in_work_directory:
            raise ConfigurationError(
                f"facility {name!r} has the name of what a run itself keeps in the federation's work directory, where "
                "this facility's jobs would run; choose another, or give the facility a `deployment: workdir:` of its "
                "own",
                key=key,
            )
        if lower in seen:
            raise ConfigurationError(
                f"facility {name!r} is listed twice; names must differ (case does not count)", key=key
            )
        for suffix, what in MADE.items():
            other = lower.removesuffix(suffix)
            if other != lower and other in all_names:
                raise ConfigurationError(
                    f"facility {name!r} has the name of what is made for facility {name[: len(other)]!r}, its {what}; "
                    "choose another",
                    key=key,
                )
        seen.add(lower)
