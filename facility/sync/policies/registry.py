"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from facility.sync.policies.adpsgd import AdPsgd
from facility.sync.policies.allreduce import AllReduce
from facility.sync.policies.gradients import CentralServer, ShardedServer
from facility.sync.policies.partial_reduce import AdPsgdBlocking, PartialReduce
from facility.sync.policies.periodic import DiLoCo, Local
from facility.sync.policies.wave import Wave
from facility.sync.protocol import Synchroniser
from facility.sync.runtime.replica import Context

POLICIES: dict[str, Callable[[Context], Synchroniser]] = {
    "allreduce": AllReduce,
    "central_ps": CentralServer,
    "sharded_ps": ShardedServer,
    "partial_reduce": PartialReduce,
    "adpsgd": AdPsgd,
    "adpsgd_blocking": AdPsgdBlocking,
    "wave": Wave,
    "local": Local,
    "diloco": DiLoCo,
}


def build(settings: Any, **parts: Any) -> Synchroniser:
    """The policy that the settings name, connected."""
    return POLICIES[settings.policy](Context(settings=settings, **parts))
