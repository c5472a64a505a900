"""Local steps, then everybody averages: `local`, and `diloco` with an outer step.

`local` is local SGD (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019), which xFFL calls federated
scaling: replicas (groups of ranks, of any size) average every k steps, weighted by the samples each trained on.

`diloco`: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023 (arXiv 2311.08105),
Algorithm 1: the mean of what the replicas changed is an outer gradient, on which Nesterov's momentum makes the step.
"""

from __future__ import annotations

import torch

from facility.sync.runtime.link import Decision
from facility.sync.runtime.process_groups import Channel
from facility.sync.runtime.replica import Context, Replica, ring_bytes


class Local(Replica):
    """Every `every` steps one weighted mean over all that are here; voted on, so that all have it or none."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._counted = self.samples
        """Samples at the last average."""
        self._last = self.done
        """Steps at the last average."""

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
                self.done = max(self.done, foremost * self.settings.every)
            if self._meet(decision):
                break
            kind = "again"
        self._counted, self._last = self.samples, self.done

    def _amount(self, decision: Decision) -> float:
        """This replica's weight before normalising."""
        if self.me in decision.returning:
            return 0.0
        return max(self.samples - self._counted, 1e-12) if self.settings.weights == "samples" else 1.0

    def _meet(self, decision: Decision) -> bool:
        return self.averaged(decision, vote=True, amount=self._amount(decision))


class DiLoCo(Local):
    """The mean becomes an outer gradient. Outer parameters and momentum are the same bits on every replica."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._outer = self.flat.pack()
        self._momentum = torch.zeros_like(self._outer)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"momentum": self._momentum}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self._momentum.copy_(state["momentum"])

    def _meet(self, decision: Decision) -> bool:
        amount = self._amount(decision)
        result: list[torch.Tensor] = []

        def action(channel: Channel) -> int:
            sent = ring_bytes(self.flat.bytes, len(decision.members))
            both = torch.cat([self._outer, self._momentum])
            if decision.returning:
                root = next(i for i, m in enumerate(decision.members) if m not in decision.returning)
                channel.broadcast(both, root)
                sent += both.numel() * 4
            result.append(both)
            result.append(self.mean(channel, self.share(channel, amount), self.flat))
            return sent

        if not self.exchange(decision, action, vote=True):
            return False
        both, mean = result if result else (torch.cat([self._outer, self._momentum]), self.flat.pack())
        outer, momentum = both.split(self.flat.size)
        rate, decay = self.settings.outer_learning_rate, self.settings.outer_momentum
        gradient = outer - mean
        momentum = momentum * decay + gradient
        self._outer = outer - rate * (gradient + decay * momentum)
        self._momentum = momentum
        self.flat.unpack(self._outer)
        return True
