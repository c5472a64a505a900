"""One aggregation, stage by stage; each stage fills in its part of an `Aggregation` (`coordinator.aggregation.round`).

open      opening.py     the model and every update; what does not fit is refused
screen    screening.py   weights, a measuring pass where one is needed, outliers
plan      plan.py        clipping, and what the aggregation rule decides
write     writing.py     the pass that makes the next model and state (kernel.py)
describe  describe.py    what round.json says
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coordinator.aggregation.describe import describe
from coordinator.aggregation.opening import open_round
from coordinator.aggregation.plan import plan_round
from coordinator.aggregation.record import RoundRecord
from coordinator.aggregation.request import Request
from coordinator.aggregation.round import Aggregation
from coordinator.aggregation.screening import screen_round
from coordinator.aggregation.sources import DamagedUpdate
from coordinator.aggregation.state import make_way
from coordinator.aggregation.stated_norms import NotConfirmed
from coordinator.aggregation.writing import new_outputs, seal_outputs, write_tensors
from facility.exchange.errors import InputError, TransientError, UpdateRefused
from facility.exchange.files.durable import scratch_directory
from facility.exchange.files.storage import file_error_sentence


def aggregate(request: Request) -> RoundRecord:
    """Write the next model and the state, neither of which may exist; returns what round.json says.

    Both appear atomically, the state first, and where this raises nothing is left behind. Raises `UpdateRefused`, which
    names the facility, or with `drop_refused` goes on without it as long as `minimum_updates` are left, and the record
    says so (`dropped`). Raises another `CrossFedError` otherwise.
    """
    if request.threads < 0:
        raise InputError(f"threads is {request.threads}, expected 1 or more, or 0 for automatic")
    aggregation = Aggregation(request=request, settings=request.settings)
    temporary = Path(tempfile.gettempdir()) / "crossfed-adapters"
    with _clear_about_space(request.out), scratch_directory(temporary) as scratch:
        make_way(request.state_out, request.out)
        open_round(aggregation, scratch)
        opened = aggregation.settings
        while True:
            try:
                screen_round(aggregation)
                if request.rated is not None:
                    left_out = {*aggregation.dropped, *aggregation.quarantined}
                    aggregation.settings = request.rated(opened, left_out)
                plan_round(aggregation)
                with new_outputs(request) as outputs:
                    write_tensors(aggregation, outputs)
                    record = describe(aggregation)
                    return seal_outputs(aggregation, outputs, record)
            except NotConfirmed:  # nothing was left behind; the next turn plans with what this one measured
                aggregation.refuted = aggregation.passed
            except DamagedUpdate:
                raise
            except UpdateRefused as refusal:  # only a pass over its values could find this; nothing was left behind
                aggregation.drop(refusal)
                aggregation.check_enough(aggregation.opened)


@contextmanager
def _clear_about_space(out: Path) -> Iterator[None]:
    """A full disk, quota or file-size limit as one sentence, with the disk that it was: the model's, or the state's."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise TransientError(f"{file_error_sentence(error, out)} (nothing was left behind)") from None
