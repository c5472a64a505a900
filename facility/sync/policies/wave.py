"""Waves: a wave of local steps, then push and pull, within a bounded number of waves of the slowest.

Park et al., "HetPipe: Enabling Large DNN Training on (Whimpy) Heterogeneous GPU Clusters through Integration of
Pipelined Model Parallelism and Data Parallelism", USENIX ATC 2020 (wave-synchronous parallel, global staleness
bound D). The first replica's ranks hold the server's vector, each for its position. A replica pushes the mean over
replicas of what its wave changed (so that N replicas move the server as far as one), waits until none is more than
D waves behind, and pulls.
"""

from __future__ import annotations

import threading
import time

import torch

from facility.exchange.errors import TransientError
from facility.exchange.scheduling.policies import SyncPolicy
from facility.sync.runtime.peers import Peers
from facility.sync.runtime.process_groups import ExchangeFailed
from facility.sync.runtime.replica import Replica

DECLARATION = SyncPolicy(
    name="wave",
    summary="push and pull every `every` steps, within `staleness` waves of the slowest",
    citation="Park et al., HetPipe: Enabling Large DNN Training on (Whimpy) Heterogeneous GPU Clusters, "
    "USENIX ATC 2020",
    implementation="Wave",
    vectors=4.0,
    on_host=True,
    parameters=("every", "staleness", "progress"),
    accumulated=True,
    periodic=True,
    exchange="server",
    scheduler="facility.exchange.scheduling.gossip:waves",
)

PUSH, PULL = 1, 2
SERVER = 0
"""The replica that holds the server's vector."""


class Wave(Replica):
    def rounds(self, steps: int) -> int:
        return steps // self.settings.every

    def prepare(self) -> None:
        self._lock = threading.Lock()
        self._server = self._packed()
        """The server's vector; used on the first replica only."""
        self._pulled = self._server.clone()
        self._peers = Peers(
            self.context.store, self.place, self.context.address, self.settings.timeout_seconds, self._answer
        )

    @property
    def progress(self) -> float:
        within = self.done % self.settings.every
        return self.updates * self.settings.every / self.place.replicas + within if self.accumulated else self.done

    def after_step(self, samples: float) -> None:
        self.count(samples)
        if self.done % self.settings.every == 0:
            self._end_wave()

    def _end_wave(self) -> None:
        begin = time.monotonic()
        self._call(PUSH, (self._packed() - self._pulled) / self.place.replicas)
        pushed = time.monotonic() - begin
        decision = self.ask("ready")
        begin = time.monotonic()
        self._pull()
        seconds = pushed + time.monotonic() - begin
        self.exchange_seconds += seconds
        self.bytes += self.flat.bytes
        self.link.report(decision, ok=True, seconds=seconds, sent=self.flat.bytes)

    def finish(self) -> bool:
        if self.done % self.settings.every:
            self._call(PUSH, (self._packed() - self._pulled) / self.place.replicas)
            self._pulled = self._packed()
        return super().finish()

    def before_final(self) -> None:
        self._pull()

    def close(self) -> None:
        super().close()
        self._peers.close()

    def _packed(self) -> torch.Tensor:
        return self.flat.pack().cpu()

    def _pull(self) -> None:
        self._pulled = self._call(PULL, torch.empty(0))
        self.flat.unpack(self._pulled)

    def _call(self, kind: int, vector: torch.Tensor) -> torch.Tensor:
        if self.me == SERVER:
            return self._answer(kind, vector)
        try:
            return self._peers.call(SERVER, kind, vector)
        except ExchangeFailed as error:
            raise TransientError(f"the replica that serves the waves is gone ({error}); run the round again") from None

    def _answer(self, kind: int, vector: torch.Tensor) -> torch.Tensor:
        with self._lock:
            if kind == PUSH:
                if vector.numel() != self._server.numel():
                    raise ValueError(f"a vector of {vector.numel()} elements, expected {self._server.numel()}")
                self._server += vector
                return torch.empty(0)
            return self._server.clone()
