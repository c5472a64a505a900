"""Laws: the time in the all-reduce between replicas is told where they have one, and telling it changes no bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from facility.exchange.messages.manifest import sha256_of
from facility.exchange.messages.report import read_report
from facility.training.monitor.clock import Clock, covered
from facility.training.parallel.collectives import time_all_reduce, time_collectives
from tests.distributed import run_distributed
from tests.pico import save_pico
from tests.training.federation import write_dataset
from tests.training.layouts import arguments, run_rounds


def test_what_spans_share_counts_once():
    assert covered([]) == 0
    assert covered([(5, 6), (0, 2), (1, 3)]) == 4
    assert covered([(0, 10), (1, 2), (4, 11)]) == 11
    clock = Clock(torch.device("cpu"))
    for began, ended in ((3.0, 4.0), (1.0, 3.5)):
        clock.span("all_reduce", began, ended)
    clock.settle()
    clock.settle()
    assert clock.seconds == {"all_reduce": 3.0}


class Branches(nn.Module):
    """One of two branches by turns: the other has no gradient in that forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.even, self.odd = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return (self.even if number % 2 == 0 else self.odd)(torch.tanh(self.trunk(x))).square().sum()


def ddp_gradients(rank: int, world: int, clock: Clock | None, late: float = 0.0) -> list[torch.Tensor]:
    """Gradients of three steps of one to three micro-batches under DDP as the trainer sets it up, in small buckets.

    `late`: seconds for which the last rank sleeps before the last exchange.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(
        Branches(),
        broadcast_buffers=False,
        init_sync=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=True,
        bucket_cap_mb=0.01,
    )
    if clock is not None:
        assert dist.group.WORLD is not None
        time_all_reduce(model, dist.group.WORLD, clock)
    torch.manual_seed(rank + 1)
    found = []
    for step in range(3):
        for micro in range(step):
            with model.no_sync():
                model(torch.randn(8, 64), micro).backward()
        loss = model(torch.randn(8, 64), step)
        if late and step == 2:
            dist.barrier()
            time.sleep(late if rank == world - 1 else 0.0)
        with (clock or Clock(torch.device("cpu")))("backward"):
            loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None or step == 0
            if parameter.grad is not None:
                found.append(parameter.grad.clone())
            parameter.grad = None
    return found


def hsdp_gradients(rank: int, world: int, clock: Clock | None, shards: int = 1) -> list[torch.Tensor]:
    """Gradients of two steps under FSDP2 with replicas."""
    torch.manual_seed(0)
    model = Branches()
    mesh = init_device_mesh("cpu", (world // shards, shards), mesh_dim_names=("replica", "shard"))
    fully_shard(model.trunk, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if clock is not None:
        time_collectives(model, clock, replicas=True)
    torch.manual_seed(rank + 1)
    found = []
    for step in range(2):
        loss = model(torch.randn(8, 64), step)
        with (clock or Clock(torch.device("cpu")))("backward"):
            loss.backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad.to_local().clone())  # type: ignore[attr-defined]
    return found


def same_bits(gradients: Callable[[Clock | None], list[torch.Tensor]]) -> dict[str, float]:
    """Gradients must be the same to the bit; the time split of those that were timed."""
    clock = Clock(torch.device("cpu"))
    timed, plain = gradients(clock), gradients(None)
    assert len(timed) == len(plain) > 0 and any(bool(gradient.any()) for gradient in timed)
    for a, b in zip(timed, plain, strict=True):
        assert torch.equal(a, b)
    clock.settle()
    return clock.seconds


def three_replicas(rank: int, world: int) -> tuple[dict[str, float], dict[str, float], float]:
    ddp = same_bits(lambda clock: ddp_gradients(rank, world, clock))
    hsdp = same_bits(lambda clock: hsdp_gradients(rank, world, clock))
    clock = Clock(torch.device("cpu"))
    ddp_gradients(rank, world, clock, late=3.0)
    clock.settle()
    return ddp, hsdp, clock.seconds["all_reduce"]


def test_timing_changes_no_bit_of_three_replicas_and_stays_within_backward():
    """Three, since then dividing and multiplying by the reciprocal round differently."""
    results = run_distributed(three_replicas, 3)
    for of_rank in results:
        for seconds in of_rank[:2]:
            assert 0 < seconds["all_reduce"] < seconds["backward"]
    assert min(results[0][2], results[1][2]) > 0.2, "waiting for the late replica counts"


def split_of(out: Path) -> list[dict[str, float]]:
    return [rank["seconds"] for rank in read_report(out).details["per_rank"]]


def timed_and_not(
    rank: int, world: int, timed: list[tuple[str, list[str]]], plain: list[tuple[str, list[str]]]
) -> None:
    from facility.training.parallel import assemble, sharder

    said = run_rounds(rank, world, timed)
    assemble.time_all_reduce = sharder.time_collectives = lambda *_, **__: None  # type: ignore[assignment]
    for name, code, text in said + run_rounds(rank, world, plain):
        assert code == 0 and "Warning" not in text, f"{name}:\n{text}"


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (2, {"copies": {"sharding": "NO_SHARD"}}),
        pytest.param(4, {"hybrid": {"replicas": 2}, "pipelines": {"stages": 2, "replicas": 2}}, marks=pytest.mark.slow),
    ],
)
def test_a_report_tells_it_and_the_update_is_the_same_to_the_bit(
    tmp_path: Path, ranks: int, layouts: dict[str, dict[str, Any]]
):
    dataset, model = write_dataset(tmp_path / "data"), save_pico(tmp_path / "model")
    timed, plain = (
        [
            (
                name,
                arguments(
                    tmp_path / kind / name, model, dataset, layout=layout, batch_sequences=8, micro_batch_sequences=2
                ),
            )
            for name, layout in layouts.items()
        ]
        for kind in ("timed", "plain")
    )
    run_distributed(timed_and_not, ranks, timed, plain, timeout=240)
    for name in layouts:
        first, second = tmp_path / "timed" / name / "out", tmp_path / "plain" / name / "out"
        assert sha256_of(first / "model.safetensors") == sha256_of(second / "model.safetensors"), name
        assert "all_reduce" not in split_of(second)[0]
        for split in split_of(first):
            assert 0 < split["all_reduce"] < split["pipeline" if name == "pipelines" else "backward"], name
