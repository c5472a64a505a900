"""Asynchronous decentralised parallel SGD: after every step, average with a random peer that does not wait.

Lian, Zhang, Zhang and Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018 (arXiv
1710.06952), Algorithm 1. Each rank keeps a vector beside its parameters. Peers average against the vector at any
time; the training thread adds what its step changed and takes the vector over between steps, so that no gradient is
ever computed on parameters that change underneath. An exchange moves half the difference between what both sides
sent, so that it keeps the sum whatever happens meanwhile.
"""

from __future__ import annotations

import threading
import time

import torch

from facility.exchange.scheduling.policies import SyncPolicy
from facility.sync.runtime.peers import Peers
from facility.sync.runtime.process_groups import ExchangeFailed
from facility.sync.runtime.replica import Replica

DECLARATION = SyncPolicy(
    name="adpsgd",
    summary="average with a random peer after every step, without waiting",
    citation="Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, "
    "ICML 2018 (arXiv 1710.06952)",
    implementation="AdPsgd",
    vectors=7.0,
    on_host=True,
    parameters=("progress",),
    accumulated=True,
    planned=True,
    exchange="pair",
    scheduler="facility.exchange.scheduling.gossip:gossip",
)

SWAP, PULL = 1, 2


class AdPsgd(Replica):
    """True asynchronous gossip."""

    def prepare(self) -> None:
        self._lock = threading.Lock()
        self._vector = self._packed()
        """What peers average against; under the lock."""
        self._taken = self._vector.clone()
        """The parameters as last taken over, to know what the step changed."""
        self._peers = Peers(
            self.context.store, self.place, self.context.address, self.settings.timeout_seconds, self._answer
        )

    def after_step(self, samples: float) -> None:
        self.count(samples)
        with self._lock:
            self._vector += self._packed() - self._taken
        decision = self.ask("ready")
        begin, sent, why = time.monotonic(), 0, ""
        if decision.partner is not None:
            try:
                self._swap(decision.partner, receive_only=self.me in decision.returning)
                sent = 4 * self._vector.numel()
            except ExchangeFailed as error:
                why = str(error)  # the peer is gone: this step goes without an exchange
        with self._lock:
            self._taken = self._vector.clone()
        self.flat.unpack(self._taken)
        seconds = time.monotonic() - begin
        self.exchange_seconds += seconds
        self.bytes += sent
        self.link.report(decision, ok=not why, seconds=seconds, sent=sent, why=why)

    def before_final(self) -> None:
        # All have finished, so exchanges are over; peers may have moved the vector while this rank waited.
        self.flat.unpack(self._vector)

    def close(self) -> None:
        super().close()
        self._peers.close()

    def _packed(self) -> torch.Tensor:
        return self.flat.pack().cpu()

    def _swap(self, partner: int, *, receive_only: bool) -> None:
        with self._lock:
            mine = self._vector.clone()
        if receive_only:
            theirs = self._peers.call(partner, PULL, torch.empty(0))
            with self._lock:
                self._vector += theirs - mine
        else:
            theirs = self._peers.call(partner, SWAP, mine)
            with self._lock:
                self._vector += (theirs - mine) / 2

    def _answer(self, kind: int, theirs: torch.Tensor) -> torch.Tensor:
        with self._lock:
            mine = self._vector.clone()
            if kind == SWAP:
                if theirs.numel() != mine.numel():
                    raise ValueError(f"a vector of {theirs.numel()} elements, expected {mine.numel()}")
                self._vector += (theirs - mine) / 2
        return mine
