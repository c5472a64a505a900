"""Gradient exchange in lockstep: a standing group exchanges step after step.

Every step ends with a vote: either all ranks take the mean gradient over the same members, or none does and the step's
exchange is repeated by those that are left. So a worker's death changes nothing for the others but the mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from facility.sync.runtime.client import Decision
from facility.sync.runtime.flat import Flat, begin_state, local_gradients, optimizer_moments
from facility.sync.runtime.process_groups import Channel, ExchangeFailed
from facility.sync.runtime.replica import Context, Replica


class Lockstep(Replica):
    """A standing group exchanges step after step until membership changes. Subclasses say how."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._standing: Decision | None = None
        self._number = 0
        self._out_of_date = False

    # -- how: overridden --------------------------------------------------------------------------------------------
    def summed(
        self, channel: Channel, decision: Decision, flat: Flat, samples: float
    ) -> tuple[list[torch.Tensor], int]:
        """Vectors that hold the sum over members of samples x gradient, then the sum of samples; bytes sent."""
        raise NotImplementedError

    # -- the protocol -----------------------------------------------------------------------------------------------
    def before_step(self, samples: float) -> None:
        while self._standing is None:
            self._stand()
        self._out_of_date = False

    def reduce_gradients(self, samples: float) -> None:
        share = samples if self.settings.weights == "samples" else 1.0
        flat = Flat(local_gradients(self.context.parameters), self.context.device)
        while True:
            if self._standing is None and not self._stand():
                continue
            assert self._standing is not None
            vectors = self._vote_on(self._standing, flat, 0.0 if self._out_of_date else share)
            if vectors is not None:
                break
        self._out_of_date = False
        if vectors:
            total = vectors[-1][-1].item()
            whole = torch.cat([v for v in vectors])[:-1] if len(vectors) > 1 else vectors[0][:-1]
            flat.unpack(whole.div_(total if total > 0 else 1.0))

    def finish(self) -> bool:
        self._standing = None
        return super().finish()

    # -- groups -----------------------------------------------------------------------------------------------------
    def _stand(self) -> bool:
        """Take part in the next standing group and bring those up to date that came back."""
        decision = self.ask("ready")
        self._number = 0
        if decision.returning and not self._brought_up(decision):
            return False
        self._standing = decision
        return True

    def _brought_up(self, decision: Decision) -> bool:
        root = next(i for i, m in enumerate(decision.members) if m not in decision.returning)
        begin_state(self.context.optimizer)  # of one that comes in a new process
        state = optimizer_moments(self.context.optimizer)
        flat = Flat([*self.flat.tensors, *state], self.context.device)
        vector = torch.cat([flat.pack(), torch.tensor([self.done], dtype=torch.float32, device=self.context.device)])

        def action(channel: Channel) -> int:
            channel.broadcast(vector, root)
            return flat.bytes

        took_place, _ = self._vote(decision, action)
        if took_place and self.me in decision.returning:
            flat.unpack(vector[:-1])
            self.done, self._out_of_date = int(vector[-1].item()), True
        return took_place

    def _vote_on(self, decision: Decision, flat: Flat, samples: float) -> list[torch.Tensor] | None:
        """The summed vectors when every rank has them, [] for a group of one, None when the exchange is void."""
        box: list[torch.Tensor] = []

        def action(channel: Channel) -> int:
            vectors, sent = self.summed(channel, decision, flat, samples)
            box.extend(vectors)
            return sent

        took_place, renew = self._vote(decision, action)
        if renew or not took_place:
            self._standing = None
        return box if took_place else None

    def _vote(self, decision: Decision, action: Callable[[Channel], int]) -> tuple[bool, bool]:
        begin, sent, why = time.monotonic(), 0, ""
        try:
            if len(decision.members) > 1:
                sent = action(self.channel(decision))
        except ExchangeFailed as error:
            why = str(error)
        seconds = time.monotonic() - begin
        took_place, renew = self.link.vote(
            decision, ok=not why, seconds=seconds, sent=sent, number=self._number, why=why
        )
        self._number += 1
        self.exchange_seconds += time.monotonic() - begin
        self.bytes += sent
        if not took_place:
            self.spoiled(decision)
        return took_place, renew


def weighted_by_samples(flat: Flat, samples: float) -> torch.Tensor:
    """samples x the flat vector, and the samples behind it."""
    vector = torch.empty(flat.size + 1, dtype=torch.float32, device=flat.device)
    flat.pack(vector[:-1])
    vector[:-1].mul_(samples)
    vector[-1] = samples
    return vector
