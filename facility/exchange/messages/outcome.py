"""Exit codes that the workflow understands.

StreamFlow hangs or stops when a step inside the loop fails, so a training step reports what happened by a code that
`cwl/tools/train.cwl` lists under `successCodes`, and by what it leaves in its output directory.
"""

from __future__ import annotations

import signal
from enum import IntEnum

WARNING = (signal.SIGUSR1, signal.SIGUSR2)
"""By which a scheduler says that a job's end is near: Slurm's `--signal=USR1@300`, grid engine's `-notify` (USR2)."""
ENDING = (signal.SIGTERM, *WARNING)
"""Signals by which a scheduler says that a job's end is near, or that it is now."""


class Outcome(IntEnum):
    """Exit code of `facility.train` and of the steps around it."""

    DONE = 0
    """The output directory is a complete update."""
    SKIPPED = 7
    """The facility takes no part in this round: no update, or a directory holding only `failure.json`."""
    CHECKPOINTED = 85
    """Time ran out: state is saved at the facility, and the same command goes on mid-round."""
