"""The registries whose entries the reference lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from coordinator.aggregation.rules.registry import RULES
from coordinator.aggregation.server_optimizers.registry import SERVER_OPTIMIZERS
from coordinator.schedulers.registry import describe_schedulers
from facility.exchange.messages.optimizers import OPTIMIZERS
from facility.exchange.messages.settings import describe_codecs
from facility.exchange.messages.sync import describe_policies
from facility.exchange.schedules.registry import SCHEDULES

REGISTRIES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "Aggregation rules": RULES.describe,
    "Server optimizers": SERVER_OPTIMIZERS.describe,
    "Inner optimizers": OPTIMIZERS.describe,
    "Synchronisation policies": describe_policies,
    "Pipeline schedules": SCHEDULES.describe,
    "Delta codecs": describe_codecs,
    "Schedulers": describe_schedulers,
}
"""Title -> a function that describes every entry."""
