"""Evaluate one model on tasks of lm-eval, apart from any round: `python -m facility.evaluate --model DIR ...`

Ends with 0 in any case: the result holds the scores, or the reason why there are none.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from pathlib import Path
from typing import Any

from facility.exchange.command_line import parse_arguments
from facility.exchange.errors import CrossFedError, exit_on_error
from facility.exchange.files.durable import write_json
from facility.exchange.json_values import read_values
from facility.exchange.logs import add_log_options
from facility.exchange.messages.evaluation import EvaluationSettings
from facility.exchange.validation import parse_dataclass
from facility.rounds.evaluation import evaluate_model

log = logging.getLogger(__name__)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m facility.evaluate", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="the Hugging Face checkpoint")
    add("--settings", type=Path, required=True, metavar="FILE", help="tasks, batch, limit and so on (JSON)")
    add("--out", type=Path, required=True, metavar="FILE", help="the scores, JSON")
    add("--device", default="auto", help="auto, cpu or cuda (default auto)")
    add_log_options(parser)
    arguments = parse_arguments(parser)
    settings = parse_dataclass(EvaluationSettings, read_values(arguments.settings), file=arguments.settings)
    try:
        found = evaluate_model(arguments.model, settings, dataset=arguments.model, device=arguments.device)
        answer: dict[str, Any] = {"results": [dataclasses.asdict(one) for one in found]}
    except (CrossFedError, OSError, ValueError, KeyError) as error:
        log.error("the evaluation on tasks failed: %s", error)
        answer = {"results": [], "problem": str(error)}
    write_json(arguments.out, answer)
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main, level="info"))
