"""Policies by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .adpsgd import AdPsgd
from .allreduce import AllReduce
from .gradients import CentralServer, ShardedServer
from .partial_reduce import AdPsgdBlocking, PartialReduce
from .periodic import DiLoCo, Local
from .policy import Synchroniser
from .replica import Context
from .wave import Wave

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
