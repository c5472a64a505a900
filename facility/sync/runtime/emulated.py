"""A synchroniser that first slows its replica down as the emulation says: for rehearsals of unequal facilities."""

from __future__ import annotations

import time
from typing import Any

import torch

from facility.exchange.messages.emulation import Emulation
from facility.sync.protocol import ReplicaRank, Synchroniser


class Emulated:
    """Delegates everything; the time a step would have lost is slept before its gradients are exchanged.

    Draws are counted as the shared law counts them: two for each micro-batch (a forward, a backward) of this stage.
    """

    def __init__(self, inner: Synchroniser, emulation: Emulation, place: ReplicaRank, backwards_per_step: int) -> None:
        self.inner, self.emulation, self.place = inner, emulation, place
        self.draws_per_step = 2 * backwards_per_step
        self.draw = self.draws_per_step * inner.done
        self.slept = 0.0
        self._start = self._step_began = time.monotonic()

    def wants_more(self) -> bool:
        return self.inner.wants_more()

    @property
    def remaining(self) -> int | None:
        return self.inner.remaining

    @property
    def progress(self) -> float:
        return self.inner.progress

    @property
    def step_scale(self) -> float:
        return self.inner.step_scale

    @property
    def done(self) -> int:
        return self.inner.done

    @property
    def samples(self) -> float:
        return self.inner.samples

    @property
    def pausing(self) -> bool:
        return self.inner.pausing

    @property
    def members(self) -> tuple[int, ...]:
        return self.inner.members

    def ask_to_pause(self) -> None:
        self.inner.ask_to_pause()

    def before_step(self, samples: float) -> None:
        """Nothing begins during the real passes: what is emulated comes after them."""

    def reduce_gradients(self, samples: float) -> None:
        now = time.monotonic()
        slower = self.emulation.factor(self.place.replica, now - self._start) - 1.0
        seconds = max(0.0, slower) * (now - self._step_began)
        for _ in range(self.draws_per_step):
            seconds += self.emulation.stall(self.place.replica, self.draw, stage=self.place.position)
            self.draw += 1
        self.slept += seconds
        time.sleep(seconds)
        self.inner.reduce_gradients(samples)

    def after_step(self, samples: float) -> None:
        self.inner.after_step(samples)
        self._step_began = time.monotonic()

    def finish(self) -> bool:
        return self.inner.finish()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.inner.load_state_dict(state)

    def report(self) -> dict[str, Any]:
        return self.inner.report() | {"emulated_seconds_here": round(self.slept, 4)}

    def close(self) -> None:
        self.inner.close()
