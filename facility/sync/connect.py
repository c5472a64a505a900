"""Connect this rank to the other replicas, under the policy that the settings name."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from facility.exchange.scheduling.policies import POLICIES
from facility.sync.protocol import Synchroniser
from facility.sync.runtime.emulated import Emulated
from facility.sync.runtime.replica import Context
from facility.sync.single import SingleReplica


def connect_replicas(context: Context, *, namespace: str = "sync") -> Synchroniser:
    """Meet the other replicas and return the policy's synchroniser. A single replica never communicates.

    The store is used below `namespace` only, another one for every round.
    """
    settings, place = context.settings, context.place
    emulation = settings.emulation.build()
    if place.replicas == 1:
        synchroniser: Synchroniser = SingleReplica(context.steps, context.done)
    else:
        store = dist.PrefixStore(namespace, context.store)
        synchroniser = POLICIES.load(settings.policy)(replace(context, store=store))
    return Emulated(synchroniser, emulation, place, context.backwards_per_step) if emulation.active else synchroniser
