"""The planner and the trainer agree: a plan that is made is a plan that the trainer can lay out, without any rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from coordinator.planning.solve import solve
from coordinator.planning.stop import Stop
from facility.exchange.messages.plan import Plan, plan_from_json
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.schedules.registry import SCHEDULES
from facility.training.parallel.arrange import Layout, layout_of_plan, remapped_rank
from facility.training.parallel.pipeline import class_for
from facility.training.processes.ranks import Ranks
from tests.planning.cases import problem


def laid_out(plan: Plan, *, devices: int, blocks: int, batch: int) -> list[Layout]:
    """The trainer's layout on each rank that the plan uses. Raises `ConfigurationError` where it refuses."""
    found = []
    for number in range(devices):
        rank = Ranks(
            rank=number,
            world=devices,
            local_rank=number,
            local_world=devices,
            device=torch.device("cpu"),
            number=number,
        )
        seat = remapped_rank(rank, plan, 1)
        if seat is not None:
            asked = TrainingSettings(batch_sequences=batch)
            found.append(layout_of_plan(plan, seat, asked, blocks=blocks, block_tokens=16))
    return found


def torch_schedule(plan: Plan, row: int, micro_batches: int) -> Any:
    """torch's schedule for a row of the plan, as the trainer takes it. Raises `ValueError` where torch refuses it."""
    kind = class_for(SCHEDULES.get(plan.schedule), micro_batches, plan.stages * plan.virtual_stages)
    stages = [
        SimpleNamespace(
            num_stages=plan.stages * plan.virtual_stages,
            stage_index=row + chunk * plan.stages,
            group_size=plan.stages,
            group_rank=row,
            has_backward=True,
            is_first=row + chunk == 0,
            is_last=False,
            submod=torch.nn.Identity(),
            device=torch.device("cpu"),
        )
        for chunk in range(plan.virtual_stages)
    ]
    several = issubclass(kind, torch_schedules.PipelineScheduleMulti)
    return kind(
        stages if several else stages[0], micro_batches, loss_fn=lambda output, target: output, scale_grads=False
    )


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 99),
    devices=st.integers(1, 5),
    blocks=st.integers(2, 6),
    batch=st.sampled_from([6, 16, 20]),
    sizes=st.sampled_from([[1], [1, 2]]),
    schedules=st.lists(st.sampled_from(sorted(SCHEDULES.built_in)), min_size=1, max_size=3, unique=True),
    policies=st.sampled_from([[], ["partial_reduce", "adpsgd"]]),
)
@example(seed=0, devices=4, blocks=4, batch=6, sizes=[1], schedules=["1f1b"], policies=[])
@example(
    seed=1,
    devices=3,
    blocks=2,
    batch=16,
    sizes=[1],
    schedules=["gpipe"],
    policies=["partial_reduce", "adpsgd"],
)
def test_every_plan_is_one_that_the_trainer_takes(
    seed: int,
    devices: int,
    blocks: int,
    batch: int,
    sizes: list[int],
    schedules: list[str],
    policies: list[str],
) -> None:
    stalls = {"stalls": {"probability": 0.2, "seconds": 0.05}} if policies else {}
    asked = problem(
        devices=devices,
        blocks=blocks,
        seed=seed,
        batch_samples=batch,
        micro_batch_samples=sizes,
        schedules=schedules,
        policies=policies,
        **stalls,
    )
    plan = plan_from_json(solve(asked, Stop(0.3, 3), seed=seed).to_json())
    assert not plan.compressed_links
    layouts = laid_out(plan, devices=devices, blocks=blocks, batch=batch)
    assert len(layouts) == plan.world_size
    for layout in layouts:
        assert layout.grid.ranks.shape == (plan.replicas, plan.stages, 1)
        assert layout.shape.batch_sequences == batch and layout.shape.micro_batches == plan.replica_micro_batches
        assert layout.sync.policy == plan.sync.name or plan.sync.name == "allreduce"
    if plan.stages * plan.virtual_stages > 1:
        for row in range(plan.stages):
            for count in set(plan.replica_micro_batches):
                torch_schedule(plan, row, count)


@pytest.mark.parametrize("name", sorted(SCHEDULES.built_in))
def test_the_stand_in_for_stages_is_refused_where_torch_refuses_real_ones(name: str) -> None:
    """Five micro-batches in two rounds of two stages divide under no interleaved schedule."""
    virtual = 2 if SCHEDULES.get(name).interleaved else 1
    plan = Plan(
        stages=2,
        replicas=1,
        grid=((0,), (1,)),
        stage_units=((0, 2), (2, 4)) if virtual == 1 else ((0, 1), (1, 2), (2, 3), (3, 4)),
        virtual_stages=virtual,
        schedule=name,
        micro_batches=5,
    )
    if virtual == 1:
        assert torch_schedule(plan, 0, 5) is not None
        return
    with pytest.raises(ValueError, match="multiple of the number of rounds"):
        torch_schedule(plan, 0, 5)
