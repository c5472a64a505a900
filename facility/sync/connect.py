"""Connect this rank to the other replicas, under the policy that the settings name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from facility.exchange.messages.sync import SyncSettings
from facility.exchange.scheduling.policies import POLICIES
from facility.sync.protocol import ReplicaRank, Synchroniser
from facility.sync.runtime.emulated import Emulated
from facility.sync.runtime.replica import Context
from facility.sync.single import SingleReplica


def connect(
    settings: SyncSettings,
    *,
    place: ReplicaRank,
    parameters: Sequence[torch.Tensor],
    steps: int,
    store: dist.Store,
    done: int = 0,
    samples: float = 0.0,
    optimizer: torch.optim.Optimizer | None = None,
    backwards_per_step: int = 1,
    device: torch.device | None = None,
    address: str = "127.0.0.1",
    log: Path | None = None,
    namespace: str = "sync",
    outlives: bool = False,
) -> Synchroniser:
    """Meet the other replicas and return the policy's synchroniser. A single replica never communicates.

    Arguments other than `namespace` are explained in `Context`. `store` is one that all ranks reach (TCPStore); it is
    used below `namespace` only, another one for every round.
    """
    emulation = settings.emulation.build()
    if place.replicas == 1:
        synchroniser: Synchroniser = SingleReplica(steps, done)
    else:
        policy = POLICIES.load(settings.policy)
        synchroniser = policy(
            Context(
                settings=settings,
                place=place,
                parameters=list(parameters),
                steps=steps,
                done=done,
                samples=samples,
                store=dist.PrefixStore(namespace, store),
                optimizer=optimizer,
                backwards_per_step=backwards_per_step,
                device=device or parameters[0].device,
                address=address,
                log=log,
                outlives=outlives,
            )
        )
    return Emulated(synchroniser, emulation, place, backwards_per_step) if emulation.active else synchroniser
