"""When to stop before the end: a signal from the scheduler, or the time budget."""

from __future__ import annotations

import signal
import time
from types import FrameType

from facility.exchange.messages.layout import LimitSettings
from facility.exchange.messages.outcome import ENDING


class Stop:
    """Notes the scheduler's signals and the deadline; never interrupts a step."""

    def __init__(self, limits: LimitSettings, began: float) -> None:
        """The budget of `limits.seconds` runs from `began` (time.perf_counter)."""
        self.reason = ""
        self._after, seconds = limits.stop_after, limits.seconds
        self._deadline = began + seconds if seconds else None
        self._longest = 0.0
        self._last = time.perf_counter()
        self._asked = False
        for number in ENDING:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.reason = f"signal {signal.Signals(number).name}"

    def nothing_to_save(self) -> None:
        """SIGTERM ends this process at once, as it does one that asks for no signal: only steps can be stopped between,
        and an evaluation went on until it was killed, two minutes after the run that had asked for it had ended.

        A warning ahead of the end is still only noted: there may be time enough."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def wanted(self, done: int, *, resumed: bool = False) -> bool:
        """To be asked once before each step, `done` being behind: is there no time for another step and for saving?

        The time until the first step counts as one. An attempt that goes on from a saved state (`resumed`) takes a
        step all the same: it would be repeated for ever.
        """
        if self._after and done >= self._after:
            self.reason = f"limits.stop_after is {self._after}"
        now = time.perf_counter()
        self._longest, self._last = max(self._longest, now - self._last), now
        needed = 0.0 if resumed and not self._asked else 2 * self._longest
        self._asked = True
        if self._deadline is not None and now + needed > self._deadline and not self.reason:
            self.reason = "the time budget is used up"
        return bool(self.reason)
