"""The command line of a workflow step: the options that several steps take, declared once."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from facility.exchange.logs import add_log_options

SHARED: dict[str, dict[str, Any]] = {
    "federation": {"type": Path, "required": True, "help": "coordinator.json, rendered by `crossfed render`"},
    "archive": {
        "required": True,
        "help": "archive directory; relative paths count from $CROSSFED_HOME or the checkout",
    },
    "model": {"type": Path, "required": True, "help": "global model that the round starts from"},
    "round": {"type": int, "required": True, "help": "number of the round, from 0"},
    "facility": {"required": True, "help": "name of the facility that the step is for"},
    "updates": {"type": Path, "nargs": "*", "default": [], "help": "directories from the receive steps"},
}


def step_parser(step: str, text: str | None, *shared: str) -> argparse.ArgumentParser:
    """The parser of `python -m coordinator.steps.STEP`: `--federation`, options of logging, and those in `shared`."""
    parser = argparse.ArgumentParser(prog=f"python -m coordinator.steps.{step}", description=text)
    for name in ("federation", *shared):
        parser.add_argument(f"--{name}", **SHARED[name])
    add_log_options(parser)
    return parser
