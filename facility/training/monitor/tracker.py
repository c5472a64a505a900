"""Steps logged to a tracker of accelerate's (TensorBoard, ...), without a trace where it is not installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from facility.training.processes.ranks import Ranks


class Tracker:
    """One run; does nothing where no tracker is named, on other ranks than the first, or without the package."""

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
            options = {"logging_dir": str(directory)} if kind.requires_logging_directory else {}
            tracker = kind(run, **options)
            if hasattr(tracker, "start"):
                tracker.start()
            self._tracker = tracker
        except (ImportError, ModuleNotFoundError, NameError) as error:
            self.reason = f"tracker {name!r} is off: {error}"

    def log(self, step: int, **values: float) -> None:
        if self._tracker is not None:
            self._tracker.log(values, step=step)

    def close(self) -> None:
        if self._tracker is not None:
            self._tracker.finish()
