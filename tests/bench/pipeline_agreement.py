"""The simulator beside the trainer's own pipeline schedules on real gloo processes. Prints JSON.

    python -m tests.bench.pipeline_agreement [--ranks 4] [--iterations 4]

Each rank runs the schedule classes that the trainer uses (`facility.training.compute.SCHEDULES`) over stages whose forward and
backward sleep, so that two cores can play any number of devices. Cases: equal stages, unequal stages, random stalls (the
seeded ones, so that the simulator meets the same). The simulator is told what measuring would tell it: the mean seconds of
a forward and of a backward pass on each rank and the latency of a message, from the same processes. `error_of_nominal`
is what it says when told the sleeping times that were asked for (a busy machine wakes sleepers late).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from coordinator.simulation.iteration import simulate_layout
from coordinator.simulation.layout import Layout
from facility.exchange.emulation import Emulation
from tests.distributed import run_distributed

FORWARD, BACKWARD = 0.05, 0.10
"""Seconds of a micro-batch on a stage of factor 1."""
CASES: list[dict[str, Any]] = [
    {"name": "equal stages", "factors": [1.0, 1.0, 1.0, 1.0], "probability": 0.0},
    {"name": "unequal stages", "factors": [1.0, 2.0, 0.5, 1.5], "probability": 0.0},
    {"name": "stalls of 0.1 s, probability 0.1", "factors": [1.0, 1.0, 1.0, 1.0], "probability": 0.1},
]
SCHEDULES = [("gpipe", 1, 8), ("1f1b", 1, 8), ("interleaved_1f1b", 2, 8), ("interleaved_zero_bubble", 2, 8)]


def pipeline_rank(rank: int, world: int, cases: list[dict[str, Any]], schedules: list[tuple[str, int, int]], iterations: int) -> dict[str, Any]:  # fmt: skip
    """Run every schedule in every case; seconds of each iteration on this rank, and the latency of a message."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    from facility.training.compute import SCHEDULES as TRAINERS

    class Times:
        """What a rank sleeps, and how many forwards and backwards it has run."""

        def __init__(self, emulation: Emulation, factor: float) -> None:
            self.emulation, self.factor, self.draws = emulation, factor, 0
            self.lateness: dict[str, list[float]] = {"forward": [], "input": [], "weight": []}

        def rest(self, what: str, seconds: float, stall: float = 0.0) -> None:
            begin = time.perf_counter()
            time.sleep(stall + seconds)
            self.lateness[what].append(time.perf_counter() - begin - stall - seconds)

        def stalled(self) -> float:
            self.draws += 1
            return self.emulation.stall(0, self.draws - 1, stage=rank)

    class Through(torch.autograd.Function):
        """Sleeps a forward, and in the backward the part for the input."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, times: Times, virtual: int) -> torch.Tensor:
            ctx.times, ctx.virtual = times, virtual
            times.rest("forward", FORWARD * times.factor / virtual, times.stalled())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            ctx.times.rest("input", BACKWARD / 2 * ctx.times.factor / ctx.virtual, ctx.times.stalled())
            return grad.contiguous(), None, None

    class Weight(torch.autograd.Function):
        """Sleeps in the backward the part for the weights."""

        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor, times: Times, virtual: int) -> torch.Tensor:
            ctx.times, ctx.virtual = times, virtual
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            ctx.times.rest("weight", BACKWARD / 2 * ctx.times.factor / ctx.virtual)
            return grad, None, None

    class Sleeper(nn.Module):
        def __init__(self, times: Times, virtual: int, *, first: bool) -> None:
            super().__init__()
            self.times, self.virtual = times, virtual
            self.weight = nn.Parameter(torch.zeros(8))
            self.anchor = nn.Parameter(torch.zeros(1)) if first else None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.anchor is not None:
                x = x + self.anchor  # the first stage has no input to differentiate for, but works as long
            return Through.apply(x, self.times, self.virtual) + Weight.apply(self.weight, self.times, self.virtual)

    ball = torch.zeros(8)
    trips = []
    for turn in range(30):
        for a in range(world - 1):
            if rank in (a, a + 1):
                begin = time.perf_counter()
                for sender in (a, a + 1):
                    if rank == sender:
                        dist.send(ball, 2 * a + 1 - rank)
                    else:
                        dist.recv(ball, 2 * a + 1 - rank)
                if rank == a and turn > 4:
                    trips.append((time.perf_counter() - begin) / 2)
    found: dict[str, Any] = {"latency": statistics.median(trips) if trips else None}
    for case in cases:
        for schedule, virtual, micro_batches in schedules:
            times = Times(Emulation(probability=case["probability"], seconds=0.1, seed=3), case["factors"][rank])
            chunks = world * virtual
            shape = torch.empty(1, 8, device="meta", requires_grad=True)
            stages = [
                PipelineStage(Sleeper(times, virtual, first=rank + k == 0), rank + k * world, chunks, torch.device("cpu"), input_args=(shape,), output_args=(shape,))
                for k in range(virtual)
            ]  # fmt: skip
            kind = TRAINERS[schedule]
            several = issubclass(kind, PipelineScheduleMulti)
            runner = kind(stages if several else stages[0], micro_batches, loss_fn=lambda y, t: (y - t).sum())
            seconds = []
            for number in range(iterations + 1):  # the first one sets up connections
                if number == 1:
                    times.draws = 0
                    times.lateness = {"forward": [], "input": [], "weight": []}
                dist.barrier()
                begin = time.perf_counter()
                arguments = (torch.zeros(micro_batches, 8),) if rank == 0 else ()
                target = torch.zeros(micro_batches, 8) if rank == world - 1 else None
                runner.step(*arguments, target=target)
                dist.barrier()
                if number:
                    seconds.append(time.perf_counter() - begin)
            late = {what: statistics.mean(values) for what, values in times.lateness.items()}
            found[f"{case['name']}, {schedule}"] = {"seconds": seconds, "late": late}
    return found


def simulated(case: dict[str, Any], schedule: str, virtual: int, micro_batches: int, ranks: int, iterations: int, latency: float, late: list[dict[str, float]]) -> tuple[float, ...]:  # fmt: skip
    """What the simulator says of the same iterations."""
    factors = np.tile(np.array(case["factors"][:ranks]), virtual)[:, None] / virtual
    forward = np.tile([rank["forward"] for rank in late], virtual)[:, None]
    backward = np.tile([rank["input"] + rank["weight"] for rank in late], virtual)[:, None]
    emulation = Emulation(probability=case["probability"], seconds=0.1, seed=3)
    layout = Layout(
        grid=tuple((r,) for r in range(ranks)),
        virtual_stages=virtual,
        schedule=schedule,
        micro_batches=(micro_batches,),
        forward_seconds=FORWARD * factors + forward,
        backward_seconds=BACKWARD * factors + backward,
        cut_bytes=np.zeros(ranks * virtual - 1),
        gradient_bytes=np.zeros(ranks * virtual),
        latency=np.full((ranks, ranks), latency),
        bandwidth=np.full((ranks, ranks), 1e9),
        sync="none",
        transport="blocking",
    )
    return simulate_layout(
        layout, iterations=iterations, stall=lambda replica, stage, draw: emulation.stall(replica, draw, stage=stage)
    ).iterations


def compare(ranks: int, iterations: int, cases: list[dict[str, Any]], schedules: list[tuple[str, int, int]]) -> dict[str, Any]:  # fmt: skip
    """Real and simulated seconds of an iteration, side by side."""
    found = run_distributed(pipeline_rank, ranks, cases, schedules, iterations, timeout=600)
    latency = statistics.median(f["latency"] for f in found if f["latency"] is not None)
    rows = []
    for case in cases:
        for schedule, virtual, micro_batches in schedules:
            key = f"{case['name']}, {schedule}"
            real = [max(f[key]["seconds"][n] for f in found) for n in range(iterations)]
            late = [f[key]["late"] for f in found]
            asked = [dict.fromkeys(rank, 0.0) for rank in late]
            said, nominal = (
                simulated(case, schedule, virtual, micro_batches, ranks, iterations, latency, times)
                for times in (late, asked)
            )
            rows.append(
                {
                    "case": case["name"],
                    "schedule": schedule,
                    "real_seconds": round(statistics.mean(real), 4),
                    "simulated_seconds": round(statistics.mean(said), 4),
                    "error": round(sum(said) / sum(real) - 1, 4),
                    "error_of_nominal": round(sum(nominal) / sum(real) - 1, 4),
                    "late_ms": round(1e3 * statistics.mean(v for rank in late for v in rank.values()), 3),
                }
            )
    return {
        "ranks": ranks,
        "iterations": iterations,
        "forward_seconds": FORWARD,
        "backward_seconds": BACKWARD,
        "message_latency_seconds": round(latency, 6),
        "rows": rows,
        "largest_error": max(abs(row["error"]) for row in rows),
    }


def main() -> int:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--ranks", type=int, default=4, help="processes, 2 to 4 (default 4)")
    top.add_argument("--iterations", type=int, default=4, help="timed iterations a case (default 4)")
    options = top.parse_args()
    print(json.dumps(compare(options.ranks, options.iterations, CASES, SCHEDULES), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
