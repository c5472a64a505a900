"""`python -m coordinator.asynchronous.submit`: submit one facility's update; ends once its group is aggregated.

Without `--update` it reports where the facility's chain continues, which is how each chain begins. It always exits with
0, because a step that fails inside a loop hangs the engine: the archive records the error, and the report step fails.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from pathlib import Path

from coordinator.archive.rounds import Archive
from coordinator.asynchronous.buffer import Meeting, Next, meeting_of
from coordinator.config.settings import read_coordinator_settings
from coordinator.events.event import emit
from coordinator.events.outputs import wait, write_outputs
from coordinator.rounds.order import OUTPUT, order_or_tell
from facility.exchange.errors import CrossFedError, TryAgain, exit_on_error
from facility.exchange.files.paths import resolve
from facility.exchange.logs import add_log_options

log = logging.getLogger("coordinator.asynchronous.submit")

POLL_SECONDS = 0.5


def meet(
    meeting: Meeting,
    facility: str,
    *,
    round: int | None = None,
    received: Path | None = None,
    poll_seconds: float = POLL_SECONDS,
) -> Next:
    """Announce what was received of `round` and wait until the facility's chain goes on or ends.

    Raises `TryAgain` when the engine that started this step is gone, or another run has begun meanwhile.
    """
    run, parent = meeting.driver().runs, os.getppid()
    if received is not None:
        assert round is not None, "an update is of a round"
        for reduced in meeting.arrive(facility, round, received):
            _tell(str(reduced))
    while True:
        driver = meeting.driver()
        if driver.runs != run or os.getppid() != parent:
            raise TryAgain(f"the run that {facility} waited in is over; the next one goes on from {meeting.place}")
        if (answer := meeting.next(driver, facility)) is not None:
            return answer
        done = meeting.look(facility)
        for reduced in done:
            _tell(str(reduced))
        if not done:
            wait(poll_seconds)


def _tell(group: str) -> None:
    log.info(group)
    emit("group", text=group)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m coordinator.asynchronous.submit", description=__doc__)
    add = parser.add_argument
    add("--federation", type=Path, required=True, help="coordinator.json, rendered by `crossfed render`")
    add("--archive", required=True, help="archive directory; relative paths count from $CROSSFED_HOME or the checkout")
    add("--facility", required=True, help="name of the facility")
    add("--model", type=Path, help="the model that its round started from; leave out to ask for its model and round")
    add("--round", type=int, help="number of its round, from 0")
    add("--update", type=Path, help="what its receive step left: a sound update, or failure.json alone")
    add_log_options(parser)
    arguments = parser.parse_args()
    settings = read_coordinator_settings(arguments.federation)
    archive = Archive(resolve(arguments.archive))
    meeting = meeting_of(archive, settings)
    name = arguments.facility
    fallback = Next(model=arguments.model or archive.model_for(0), round=arguments.round or 0, proceed=False, why="")
    try:
        answer = meet(meeting, name, round=arguments.round, received=arguments.update)
    except TryAgain as error:
        log.warning("facility %s stops waiting: %s", name, error)
        answer = fallback
    except Exception as error:  # a fault of ours must not hang the engine either
        if not isinstance(error, CrossFedError | OSError):
            traceback.print_exc()
        meeting.stop(f"{name}: {error}" if isinstance(error, CrossFedError | OSError) else f"{name}: {error!r}")
        log.error("facility %s cannot meet others: %s", name, error)
        answer = fallback
    else:
        log.info("facility %s %s: %s", name, "goes on" if answer.proceed else "ends", answer.why)
        emit("goes_on" if answer.proceed else "ends", facility=name, reason=answer.why)
    write_outputs(
        model=answer.model,
        round=answer.round,
        proceed=answer.proceed,
        facility=name if answer.proceed else None,
    )
    order_or_tell(Path.cwd() / OUTPUT, settings)
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main, level="info"))
