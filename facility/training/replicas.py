"""Bring the replicas of a facility together: nothing to do where FSDP2 does, else a policy of `facility.sync`."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from facility.exchange.seeds import derive_seed
from facility.sync.connect import connect_replicas
from facility.sync.protocol import ReplicaRank, Synchroniser
from facility.sync.runtime.replica import Context
from facility.sync.runtime.sampling import ReplicaOrder
from facility.sync.single import SingleReplica
from facility.training.engine import Engine
from facility.training.parallel.arrange import Layout
from facility.training.processes.ranks import Ranks
from facility.training.processes.rendezvous import address_of_replicas, further_store


def order_of(layout: Layout, ranks: Ranks, *, sequences: int, seed: int) -> ReplicaOrder | None:
    """The replica's own order of the data, where `training.sync.samples` asks for one; None: the common batches."""
    policy = layout.sync.samples
    if policy == "dealt" or layout.grid.replicas == 1:
        return None
    replica, _, _ = layout.grid.place(ranks.rank)
    return ReplicaOrder(
        policy=policy,
        sequences=sequences,
        replica=replica,
        replicas=layout.grid.replicas,
        seed=derive_seed(seed, "replicas"),
    )


def independent_replicas(engine: Engine) -> tuple[int, int]:
    """Number of replicas that have weights of their own, and which of them this rank is part of."""
    grid = engine.layout.grid
    return (1, 0) if engine.together else (grid.replicas, grid.place(engine.ranks.rank)[0])


def build_synchroniser(engine: Engine, *, steps: int, done: int, samples: float, round: int, log: Path) -> Synchroniser:
    """The policy at work on this rank, for `steps` steps of which `done` (on so many samples) lie before a pause."""
    if engine.together:
        return SingleReplica(steps, done)
    layout, ranks, grid = engine.layout, engine.ranks, engine.layout.grid
    replica, row, column = grid.place(ranks.rank)
    context = Context(
        settings=layout.sync,
        place=ReplicaRank(
            replica=replica,
            replicas=grid.replicas,
            position=row * grid.shards + column,
            positions=grid.stages * grid.shards,
        ),
        parameters=[part.tensor for part in engine.parts],
        optimizer=engine.optimizer,
        steps=steps,
        done=done,
        samples=samples,
        store=further_store(f"sync-{round}", ranks, timedelta(seconds=layout.sync.timeout_seconds)),
        backwards_per_step=layout.shape.micro_batches[grid.data_rank(ranks.rank)],
        device=ranks.device,
        address=address_of_replicas(ranks),
        log=log if ranks.first else None,
        outlives=True,
    )
    return connect_replicas(context, namespace=f"round-{round}")
