"""`python -m coordinator.steps.aggregate_masked`: close a round of masked updates."""

from __future__ import annotations

import sys
from pathlib import Path

from coordinator.steps.aggregate import arguments_of, close_round, run_step
from coordinator.steps.masked_round import close_masked_round
from facility.exchange.errors import exit_on_error


def main() -> int:
    parser = arguments_of("aggregate_masked", __doc__)
    parser.add_argument("--request", type=Path, required=True, help="what the facilities were asked for")
    parser.add_argument("--answers", type=Path, nargs="*", default=[], help="directories from the steps `unmask`")
    arguments = parser.parse_args()

    def close(archive, settings, *, model, number, arrived):  # type: ignore[no-untyped-def]
        if number >= settings.rounds:
            return close_round(archive, settings, model=model, number=number, arrived=arrived)
        return close_masked_round(
            archive,
            settings,
            model=model,
            number=number,
            arrived=arrived,
            request=arguments.request,
            answers=arguments.answers,
        )

    return run_step(arguments, close)


if __name__ == "__main__":
    sys.exit(exit_on_error(main, in_job=True))
