"""Synchronises each stage of a non-flushing pipeline in groups of its own, as SDPipe does.

The ranks of such a pipeline are at different steps at a time. Only one stage's scheduler at a time may hold pipelines
back (`tests.reproductions.permission`), so that stages of different pipelines never wait for each other in a circle.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist

from facility.exchange.messages.sync import SyncSettings
from facility.sync.connect import connect_replicas
from facility.sync.protocol import ReplicaRank, Synchroniser
from facility.sync.runtime.replica import Context
from tests.reproductions.permission import Permission


def connect_stage(
    settings: SyncSettings, *, place: ReplicaRank, store: dist.Store, namespace: str = "sync", **parts: Any
) -> Synchroniser:
    """As `facility.sync.connect.connect_replicas`, among the ranks at this rank's position only.

    An exchange is on the way of every gradient here and weights are stashed, so nothing is relayed and nobody waits
    for a minimum. With a bound of 1, all wait for all in one order, as under all-reduce, and no permission is needed.
    """
    shared = dist.PrefixStore(namespace, store)
    stage = dist.PrefixStore(f"stage-{place.position}", shared)
    settings = dataclasses.replace(settings, minimum=1, relay=0.0)
    alone = ReplicaRank(replica=place.replica, replicas=place.replicas)
    synchroniser = connect_replicas(Context(settings=settings, place=alone, store=stage, **parts))
    service = getattr(synchroniser, "service", None)
    if service is not None and not settings.lockstep and settings.bound != 1:
        service.scheduler.may_hold = Permission(shared, str(place.position))
    return synchroniser
