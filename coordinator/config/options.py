"""`deployment.options` and `deployment.fill`: values for StreamFlow's command lines and a job's script."""

from __future__ import annotations

import difflib
import importlib.util
import re
from pathlib import Path
from typing import Any

from facility.exchange.errors import ConfigurationError
from facility.exchange.json_values import values_in
from facility.exchange.validation import as_written

SHELL = re.compile(r"[$`\\;\"'<>\x00-\x1f\x7f]")


SEPARATE = "StreamFlow gives sbatch its value as a word of its own, which sbatch takes for the script's name"
MISSPELT = "StreamFlow gives sbatch an option that it does not know"
IN_TEMPLATE = "write it into the template, as `#SBATCH --{dashed}=...`"
UNFIT = {
    "slurm": {
        "distribution": ("StreamFlow does not hand it on", IN_TEMPLATE),
        "exclusive": (SEPARATE, IN_TEMPLATE + "; true may stand here"),
        "getUserEnv": (SEPARATE, IN_TEMPLATE),
        "mincpus": (MISSPELT, IN_TEMPLATE),
        "nice": (SEPARATE, IN_TEMPLATE),
        "propagate": (SEPARATE, IN_TEMPLATE),
        "useMinNodes": (MISSPELT, "write it into the template, as `#SBATCH --use-min-nodes`"),
        "array": ("a round is one job, and those of an array have other ids", "remove it"),
        "clusters": (
            "the login node is asked for jobs of its own cluster, where they would count as ended",
            "name a login node of that cluster as `host:`",
        ),
    }
}
"""Options of StreamFlow's connectors that do something else than they say: what, and what to do."""


def _check_option(name: str, value: Any) -> None:
    """Reject values that a shell would not read as one plain word: StreamFlow writes options into a command line."""
    values = [*value, *value.values()] if isinstance(value, dict) else value
    for one in values if isinstance(values, list) else [values]:
        if not isinstance(one, str | int | float):
            raise ConfigurationError(f"options.{name} is {one!r}, expected text or a number", key=f"options.{name}")
        if found := SHELL.search(str(one)):
            raise ConfigurationError(
                f"options.{name} is {one!r}, expected plain text; {found[0]!r} means something to the shell",
                key=f"options.{name}",
            )


def check_options(kind: str, options: dict[str, Any]) -> None:
    """Reject options that are not in the schema of StreamFlow's connector."""
    found = importlib.util.find_spec("streamflow")
    if found is None or not found.submodule_search_locations:
        return  # checked where StreamFlow is installed
    folder = Path(next(iter(found.submodule_search_locations))) / "deployment" / "connector" / "schemas"
    schema = folder / f"{kind}.json"
    known = values_in(schema)["$defs"]["service"]["properties"] if schema.is_file() else {}
    for name, value in options.items():
        _check_option(name, value)
        if name in ("file", "jobName"):
            raise ConfigurationError(f"options.{name} is set by CrossFed itself; remove it", key=f"options.{name}")
        if name not in known:
            close = difflib.get_close_matches(str(name), known, 1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigurationError(
                f"options.{name} is not an option of StreamFlow's {kind} connector{hint}", key=f"options.{name}"
            )
        unfit = UNFIT.get(kind, {}).get(name)
        if unfit is not None and (not isinstance(value, bool) or unfit[0] == MISSPELT and value):
            dashed = re.sub(r"[A-Z]", lambda letter: "-" + letter[0].lower(), name)
            raise ConfigurationError(
                f"options.{name} is set, but {unfit[0]}; {unfit[1].format(dashed=dashed)}", key=f"options.{name}"
            )
        if (expected := _other_type(value, known[name].get("type"))) is not None:
            raise ConfigurationError(
                f"options.{name} is {as_written(value)}, expected {expected}", key=f"options.{name}"
            )


OPTION_TYPES: dict[str, tuple[type, str]] = {
    "string": (str, "text: put it between quotes"),
    "integer": (int, "a whole number, without quotes"),
    "boolean": (bool, "true or false"),
    "object": (dict, 'a mapping such as {walltime: "02:00:00"}'),
    "array": (list, "a list of texts"),
}


def _other_type(value: Any, wanted: str | None) -> str | None:
    """What an option should have been whose type in StreamFlow's schema is `wanted`; None where it is of that type.

    StreamFlow converts nothing: it would refuse the rendered file as the run begins.
    """
    if wanted not in OPTION_TYPES:  # one of several
        return "text or a number" if isinstance(value, dict | list) else None
    kind, words = OPTION_TYPES[wanted]
    fits = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    if isinstance(value, list):
        fits = fits and all(isinstance(one, str) for one in value)
    elif isinstance(value, dict) and not fits:
        words = "text or a number"
    return None if fits else words


def check_fill(fill: dict[str, Any]) -> None:
    """Reject values that would be written into the template as something else than what was typed."""
    for name, value in fill.items():
        if isinstance(value, bool):
            advice = "text: put it between quotes, since YAML takes yes, no, on and off for true and false"
        elif isinstance(value, float):
            advice = "text: put it between quotes, since a number is written without its last zeros"
        elif not isinstance(value, str | int):
            advice = "text or a whole number"
        else:
            continue
        raise ConfigurationError(f"fill.{name} is {as_written(value)}, expected {advice}", key=f"fill.{name}")
