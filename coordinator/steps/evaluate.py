"""`python -m coordinator.steps.evaluate`: the model of a round on tasks, on the coordinator's own machine.

Where `evaluation.facility` is `coordinator`. It runs beside the facilities' jobs, and never fails: a step that fails
inside the loop would hang the engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.config.settings import CoordinatorSettings, read_coordinator_settings
from coordinator.events.event import emit
from facility.exchange.errors import exit_on_error
from facility.exchange.files.durable import write_json
from facility.exchange.logs import add_log_options
from facility.exchange.messages.manifest import read_manifest


def scores(model: Path, round: int, settings: CoordinatorSettings) -> dict[str, Any]:
    """`results` and perhaps `problem`; {} where nothing is due."""
    wanted = settings.evaluation
    if wanted is None or not wanted.due(round, settings.rounds) or read_manifest(model).kind != "model":
        return {}
    with tempfile.TemporaryDirectory(prefix="evaluate-") as folder:
        asked, out = Path(folder) / "settings.json", Path(folder) / "scores.json"
        write_json(asked, dataclasses.asdict(wanted))
        command = [sys.executable, "-m", "facility.evaluate", "--model", str(model), "--settings", str(asked)]
        code = start([*command, "--out", str(out)])
        try:
            return json.loads(out.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {"results": [], "problem": f"the evaluation on tasks ended with code {code}"}


def start(command: Sequence[str]) -> int:
    """Run a command to its end; returns its code."""
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m coordinator.steps.evaluate", description=__doc__)
    add = parser.add_argument
    add("--federation", type=Path, required=True, help="coordinator.json, rendered by `crossfed render`")
    add("--model", type=Path, required=True, help="the global model that the round starts from")
    add("--round", type=int, required=True, help="number of the round, from 0")
    add("--out", type=Path, required=True, help="file to write, JSON")
    add_log_options(parser)
    arguments = parser.parse_args()
    found = scores(arguments.model, arguments.round, read_coordinator_settings(arguments.federation))
    if problem := found.get("problem"):
        emit("problem", text=f"round {arguments.round}: no scores on tasks: {problem}")
    write_json(arguments.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
