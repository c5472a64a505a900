"""Caches a group's gradient and parameters at one member (the keeper), for the next, disjoint group.

The keeper answers in a thread while it computes. A replica that takes parameters leaves its own in exchange, and both
move by half the difference of what they sent (Lian et al., "Asynchronous Decentralized Parallel Stochastic Gradient
Descent", ICML 2018, arXiv 1710.06952), so that the mean over all replicas does not change; the keeper moves at its next
group.
"""

from __future__ import annotations

import threading

import torch

from facility.sync.runtime.flat import Flat
from facility.sync.runtime.peers import Peers
from facility.sync.runtime.process_groups import ExchangeFailed
from facility.sync.runtime.replica import Context


class StaleGradientCache:
    """One rank's place for what its last group left. Others can have it only while it is there."""

    def __init__(self, context: Context, flat: Flat) -> None:
        self._lock = threading.Lock()
        self._parameters = torch.empty(flat.size, dtype=torch.float32, device=context.device)
        self._gradient = torch.empty_like(self._parameters)
        self._group = 0
        """Whose the two are; 0: nothing is here."""
        self._owed: torch.Tensor | None = None
        """What the parameters are to be moved by, on the CPU."""
        limit = min(context.settings.timeout_seconds, context.settings.missing_seconds)
        self._peers = Peers(context.store, context.place, context.address, limit, self._answer)

    def put(self, group: int, flat: Flat, gradients: list[torch.Tensor]) -> None:
        """Keep parameters and gradients as the group has averaged them, before its step."""
        with self._lock:
            flat.pack(self._parameters)
            Flat(gradients, self._gradient.device).pack(self._gradient)
            self._group = group

    def withdraw(self) -> None:
        """Hand nothing on any longer."""
        with self._lock:
            self._group = 0

    def settle(self, flat: Flat) -> None:
        """Move the parameters by what is owed; not while a backward pass reads them."""
        with self._lock:
            owed, self._owed = self._owed, None
        if owed is not None:
            flat.unpack(flat.pack().add_(owed.to(self._gradient.device)))

    def fetch(self, keeper: int, group: int, flat: Flat, *, swap: bool) -> tuple[torch.Tensor | None, int]:
        """The gradient that this group of the keeper's left, and bytes sent both ways; `swap`: parameters are averaged.

        None (and nothing averaged): the keeper is at its next group already. Raises `ExchangeFailed`.
        """
        own = flat.pack().cpu() if swap else torch.empty(0)
        answer = self._peers.call(keeper, 2 * group + swap, own)
        sent = 4 * (own.numel() + answer.numel())
        if not answer.numel():
            return None, sent
        if answer.numel() != flat.size * (2 if swap else 1):
            raise ExchangeFailed(f"{answer.numel()} elements instead of {flat.size} of each kind")
        gradient = answer[: flat.size].to(self._gradient.device)
        if swap:
            flat.unpack(own.add_(answer[flat.size :]).div_(2).to(self._gradient.device))
        return gradient, sent

    def close(self) -> None:
        self._peers.close()

    def _answer(self, kind: int, theirs: torch.Tensor) -> torch.Tensor:
        with self._lock:
            if kind // 2 != self._group:
                return torch.empty(0)
            if not kind % 2:
                return self._gradient.cpu().clone()
            kept = self._parameters.cpu()
            if theirs.numel() != kept.numel():
                raise ValueError(f"a vector of {theirs.numel()} elements, expected {kept.numel()}")
            answer = torch.cat([self._gradient.cpu(), kept])
            moved = theirs.sub_(kept).div_(2)
            self._parameters += moved.to(self._parameters.device)
            self._owed = moved if self._owed is None else self._owed.add_(moved)
            return answer
