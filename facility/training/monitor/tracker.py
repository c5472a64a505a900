"""Steps logged to a tracker of accelerate's (TensorBoard, ...); one that is not installed, or fails, ends no round.

A tracker is started in the state directory: it may look into the current folder for its settings, such as the address
that the site's key is sent to, and a coordinator may write where a job runs.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

from facility.training.processes.ranks import Ranks

log = logging.getLogger(__name__)


class Tracker:
    """One run; does nothing where no tracker is named, on other ranks than the first, or once the tracker failed."""

    def __init__(self, name: str, directory: Path, run: str, ranks: Ranks) -> None:
        self._tracker: Any = None
        self.reason = ""
        if not name or not ranks.first:
            return
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        kind = LOGGER_TYPE_TO_CLASS.get(name)
        if kind is None:
            self.reason = (
                f"tracker {name!r} is unknown to accelerate; it knows {', '.join(map(str, LOGGER_TYPE_TO_CLASS))}"
            )
            return
        try:
            options = {"logging_dir": str(directory.absolute())} if kind.requires_logging_directory else {}
            with contextlib.chdir(directory):
                tracker = kind(run, **options)
                if hasattr(tracker, "start"):
                    tracker.start()
            self._tracker = tracker
        except Exception as error:  # no package, no network, no account: each raises what it likes
            self.reason = f"tracker {name!r} is off: {error}"

    def log(self, step: int, **values: float) -> None:
        self._tried("log", values, step=step)

    def close(self) -> None:
        self._tried("finish")

    def _tried(self, what: str, *arguments: Any, **named: Any) -> None:
        """Call a method of the tracker, if there is one; after an error there is none any more."""
        if self._tracker is None:
            return
        try:
            getattr(self._tracker, what)(*arguments, **named)
        except Exception as error:
            log.warning("the tracker is off from here on: %s: %s", type(error).__name__, error)
            self._tracker = None
