"""`python -m coordinator.steps.aggregate_masked`: close a round of masked updates."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from coordinator.config.settings import read_coordinator_settings
from coordinator.steps.aggregate import arguments_of, close_round, run_step
from coordinator.steps.masked_round import close_masked_round
from facility.exchange.errors import exit_on_error


def main() -> int:
    parser = arguments_of("aggregate_masked", __doc__)
    parser.add_argument("--request", type=Path, required=True, help="what the facilities were asked for")
    parser.add_argument("--answers", type=Path, nargs="*", default=[], help="directories from the steps `unmask`")
    arguments = parser.parse_args()
    if arguments.round >= read_coordinator_settings(arguments.federation).rounds:
        return run_step(arguments, close_round)
    return run_step(arguments, partial(close_masked_round, request=arguments.request, answers=arguments.answers))


if __name__ == "__main__":
    sys.exit(exit_on_error(main, in_job=True))
