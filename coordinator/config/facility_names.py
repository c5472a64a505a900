"""Names of facilities that would be taken for something else: another facility, or what is made for one."""

from __future__ import annotations

from collections.abc import Sequence

from facility.exchange.errors import ConfigurationError
from facility.exchange.messages.comparison import GLOBAL

MADE = {"-ssh": "connection", "-api": "connection", "-ahead": "jobs ahead of their model", "-login": "login commands"}
"""What is made for a facility under its own name and a suffix: in streamflow.yml, in its queue, beside its template."""


def check_names(names: Sequence[str]) -> None:
    """Raise `ConfigurationError`, with the key, for the first name that cannot stand."""
    seen: set[str] = set()
    all_names = {name.lower() for name in names}
    for number, name in enumerate(names):
        key, lower = f"facilities[{number}].name", name.lower()
        if lower == GLOBAL:
            raise ConfigurationError(
                f"facility {name!r} has the name under which curves and tables show the global model; choose another",
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
