"""Can the model be cut into the stages of a pipeline? Asked of the trainer's own code, which looks at config.json."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

from coordinator.config.federation import Facility, Federation
from coordinator.memory.figures import ModelFigures
from coordinator.preflight.bounded_process import TooMuchOutput, run_bounded
from coordinator.preflight.probe_answer import DatasetAnswer
from coordinator.preflight.row import Row, fail, ok, skipped
from facility.exchange.errors import ERROR
from facility.exchange.exit_codes import ExitCode
from facility.exchange.messages.strict_json import clean_text
from facility.exchange.task_words import TEXT_TASKS

CHECK = "stages"
SECONDS = 600.0


def check_stages(federation: Federation, datasets: Mapping[str, DatasetAnswer], model: ModelFigures) -> list[Row]:
    """A row for each facility whose settings ask for a pipeline; none for a plan, which lies at the facility, for a
    trainer of one's own, or for datasets of no known text. `datasets`: what each facility's probe said of its own."""
    said: dict[tuple[str, int], tuple[int | None, str]] = {}
    rows = []
    for one in federation.facilities:
        answer = datasets.get(one.name)
        if not _is_pipeline(federation, one) or answer is None or answer.task not in TEXT_TASKS:
            continue
        asked = (str(answer.task), answer.block_tokens or model.positions or 1024)
        if asked not in said:
            said[asked] = _ask(str(federation.path(federation.model)), *asked)
        code, words = said[asked]
        if code == ExitCode.INPUT:
            rows.append(
                fail(one.name, CHECK, words, "correct training.layout in federation.yml, or take another model")
            )
        else:
            rows.append(
                ok(one.name, CHECK, words) if code == 0 else skipped(one.name, CHECK, f"not looked at: {words}")
            )
    return rows


def _is_pipeline(federation: Federation, facility: Facility) -> bool:
    layout = facility.training.layout
    return layout.stages > 1 and not layout.plan and federation.trainer_of(facility).built_in


def _ask(model: str, task: str, tokens: int) -> tuple[int | None, str]:
    """The command's exit code, None where there is none, and the last line that it said."""
    words = [sys.executable, "-P", "-m", "facility.stages", "--model", model, "--task", task, "--tokens", str(tokens)]
    try:
        code, out, complaints = run_bounded(words, data=b"", seconds=SECONDS)
    except (TooMuchOutput, subprocess.TimeoutExpired, OSError) as error:
        return None, type(error).__name__
    lines = (complaints if code else out).decode(errors="replace").strip().splitlines() or [f"code {code}"]
    return code, clean_text(lines[-1].removeprefix(ERROR), 800)
