"""`python -m coordinator.steps.evaluate`: the model of a round on tasks, on the coordinator's own machine.

Where `evaluation.facility` is `coordinator`. It runs beside the facilities' jobs, and never fails: a step that fails
inside the loop would hang the engine.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from coordinator.config.settings import CoordinatorSettings, read_coordinator_settings
from coordinator.events.event import emit
from coordinator.steps.options import step_parser
from facility.exchange.errors import exit_on_error
from facility.exchange.files.durable import write_json
from facility.exchange.json_values import note_in
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
        scores = note_in(out)
        if scores is None:
            return {"results": [], "problem": f"the evaluation on tasks ended with code {code}"}
        return scores


def start(command: Sequence[str]) -> int:
    """Run a command to its end; returns its code."""
    return subprocess.run(command, stdin=subprocess.DEVNULL).returncode


def main() -> int:
    parser = step_parser("evaluate", __doc__, "model", "round")
    parser.add_argument("--out", type=Path, required=True, help="file to write, JSON")
    arguments = parser.parse_args()
    found = scores(arguments.model, arguments.round, read_coordinator_settings(arguments.federation))
    if problem := found.get("problem"):
        emit("problem", text=f"round {arguments.round}: no scores on tasks: {problem}")
    write_json(arguments.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
