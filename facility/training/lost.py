"""Replicas that left during a round: those that remain finish it, and the report says what was lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from facility.exchange.messages.lost_replicas import LostReplica
from facility.training.parallel.arrange import Layout


def lost_replicas(
    sync_report: dict[str, Any], layout: Layout, *, steps: int, finished: Sequence[int]
) -> list[LostReplica]:
    """Replicas not among the `finished`, from the scheduler's account; `steps` were asked of each."""
    left = {event["replica"]: event for event in sync_report.get("membership", []) if event["event"] == "left"}
    lost = []
    for replica, event in sorted(left.items()):
        if replica in finished:
            continue
        share = blocks_per_step(layout, replica)
        included = event["steps_included"]
        lost.append(
            LostReplica(
                replica=replica,
                step=event["steps"],
                blocks_trained=included * share,
                blocks_not_trained=max(0, steps - included) * share,
                reason=event["reason"],
            )
        )
    return lost


def replica_share(layout: Layout, replica: int, *, together: bool) -> int:
    """Sequences that a replica takes a step on: the whole batch where all make it `together`."""
    return layout.shape.batch_sequences if together else blocks_per_step(layout, replica)


def blocks_per_step(layout: Layout, replica: int) -> int:
    """Sequences of a replica's share of each batch."""
    bounds, shards = layout.shape.bounds, layout.grid.shards
    return bounds[(replica + 1) * shards] - bounds[replica * shards]
