"""Local SGD: local steps, then all replicas average.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019, which xFFL calls federated scaling: replicas
(groups of ranks, of any size) average every k steps, weighted by the samples each trained on.
"""

from __future__ import annotations

from facility.exchange.scheduling.policies import SyncPolicy
from facility.sync.runtime.client import Decision
from facility.sync.runtime.replica import Context, Replica

DECLARATION = SyncPolicy(
    name="local",
    summary="average parameters every `every` steps",
    citation="Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019",
    implementation="Local",
    parameters=("every", "weights", "optimizer_state"),
    periodic=True,
    synchronous=True,
)


class Local(Replica):
    """Every `every` steps one weighted mean over all that are here; voted on, so that all have it or none."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._counted = self.samples
        """Samples at the last average."""
        self._last = self.done
        """Steps at the last average."""

    def rounds(self, steps: int) -> int:
        return steps // self.settings.every

    def after_step(self, samples: float) -> None:
        self.count(samples)
        if self.done - self._last >= self.settings.every:
            self._average()

    def finish(self) -> bool:
        if self.done > self._last:
            self._average()
        return super().finish()

    def _average(self) -> None:
        kind = "ready"
        while True:
            decision = self.ask(kind)
            if self.me in decision.returning:
                # One that came back takes over the count of steps, so that all end together.
                foremost = max(r for m, r in zip(decision.members, decision.rounds, strict=True) if m != self.me)
                self.done = max(self.done, min(self.context.steps, foremost * self.settings.every))
            if self._meet(decision):
                break
            kind = "again"
        self._counted, self._last = self.samples, self.done
        self._buffer = None  # until the next average, which may be long after

    def _amount(self, decision: Decision) -> float:
        """This replica's weight before normalising."""
        if self.me in decision.returning:
            return 0.0
        return max(self.samples - self._counted, 1e-12) if self.settings.weights == "samples" else 1.0

    def _meet(self, decision: Decision) -> bool:
        return self.averaged(decision, vote=True, amount=self._amount(decision))
