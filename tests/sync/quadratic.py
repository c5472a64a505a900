"""A problem solved by hand: replica r pulls its parameters towards a target of its own, `x -= rate * (x - target)`."""

from __future__ import annotations

import time
from typing import Any

import torch

from facility.sync.connect import connect_replicas
from facility.sync.protocol import ReplicaRank
from facility.sync.runtime.replica import Context

SHAPES = [(7, 3), (5,), (11, 2)]


def target(rank: int) -> torch.Tensor:
    return torch.full((7 * 3 + 5 + 11 * 2,), float(rank + 1))


def make_parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]


def loss_of(parameters: list[torch.nn.Parameter], rank: int) -> torch.Tensor:
    vector = torch.cat([p.reshape(-1) for p in parameters])
    return 0.5 * ((vector - target(rank)) ** 2).sum()


def solve(
    rank: int,
    world: int,
    store: Any,
    settings: Any,
    steps: int,
    *,
    pause: float | tuple[float, ...] = 0.0,
    samples: tuple[float, ...] | None = None,
    seed_by_rank: bool = False,
    positions: int = 1,
    log: Any = None,
    announce: bool = True,
    optimizer_name: str = "sgd",
    started: Any = None,
    namespace: str = "sync",
    missing: int = -1,
    done: int = 0,
) -> dict[str, Any]:
    """Train with SGD (rate 0.1) or AdamW; returns the final vector and the report. `done`: steps before a pause."""
    if rank == missing:
        time.sleep(10)
    replica, position = divmod(rank, positions)
    parameters = make_parameters(seed=replica if seed_by_rank else position)
    rate = {"sgd": 0.1, "adamw": 0.05}[optimizer_name]
    optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer_name](parameters, lr=rate)
    place = ReplicaRank(replica=replica, replicas=world // positions, position=position, positions=positions)
    context = Context(
        settings=settings,
        place=place,
        parameters=parameters,
        steps=steps,
        done=done,
        store=store,
        optimizer=optimizer,
        log=log,
    )
    sync = connect_replicas(context, namespace=namespace)
    weight = 1.0 if samples is None else samples[replica]
    step = 0
    while sync.wants_more():
        seconds = pause if isinstance(pause, float) else pause[replica]
        if started is not None and step == 3:
            started(rank)
        if seconds:
            time.sleep(seconds)
        if announce:
            sync.before_step(weight)
        optimizer.zero_grad()
        loss_of(parameters, replica).backward()
        sync.reduce_gradients(weight)
        optimizer.param_groups[0]["lr"] = rate * sync.step_scale
        optimizer.step()
        sync.after_step(weight)
        step += 1
    local = torch.cat([p.detach().reshape(-1) for p in parameters]).tolist()
    sync.finish()
    vector = torch.cat([p.detach().reshape(-1) for p in parameters]).tolist()
    report = sync.report()
    sync.close()
    return {"vector": vector, "local": local, "report": report, "steps": step, "done": sync.done}
