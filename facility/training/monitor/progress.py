"""What the first rank tells while it works, on stderr."""

from __future__ import annotations

import sys
import time

from facility.exchange.messages.settings import FacilitySettings
from facility.training.engine import StepResult
from facility.training.parallel.ranks import Ranks


class Progress:
    """One line per event; steps at most once a second unless `always`."""

    def __init__(self, ranks: Ranks, settings: FacilitySettings, round: int, *, always: bool) -> None:
        self.speaks, self.always, self.total = ranks.first, always, settings.training.steps
        self.prefix = f"[{settings.facility} round {round}]"
        self._last = 0.0

    def say(self, text: str) -> None:
        if self.speaks:
            print(f"{self.prefix} {text}", file=sys.stderr, flush=True)

    def step(self, step: int, result: StepResult) -> None:
        now = time.monotonic()
        if self.always or step == self.total or now - self._last >= 1.0:
            self._last = now
            self.say(
                f"step {step}/{self.total}  loss {result.loss:.4f}  "
                f"gradient norm {result.gradient_norm:.3f}  learning rate {result.rate:.2e}"
            )
