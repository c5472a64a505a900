"""The simulator beside the trainer's own pipeline schedules on real gloo processes. Prints JSON.

    python -m tests.bench.pipeline_agreement [--ranks 4] [--iterations 2]

Each rank runs the schedule classes that the trainer uses (`facility.exchange.schedules.registry`) over stages
whose forward and backward sleep, so that two cores can play any number of devices. Cases: equal stages, unequal
stages, random stalls (the seeded ones, so that the simulator meets the same). A busy machine wakes sleepers late and
lets a pass wait for a core, so the simulator is told three things: `error`: what every single pass took longer than it
was to sleep; `error_by_means`: the mean seconds of a pass on each rank, as measuring would tell;
`error_by_what_was_asked`: the sleeping times alone. The latency of a message is measured in the same processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from coordinator.simulation.pipelines.iteration import simulate_layout
from coordinator.simulation.pipelines.layout import Layout
from facility.exchange.messages.emulation import Emulation
from tests.distributed import run_distributed

FORWARD, BACKWARD = 0.08, 0.16
"""Seconds of a micro-batch on a stage of factor 1."""
CASES: list[dict[str, Any]] = [
    {"name": "equal stages", "factors": [1.0, 1.0, 1.0, 1.0], "probability": 0.0},
    {"name": "unequal stages", "factors": [1.0, 2.0, 0.5, 1.5], "probability": 0.0},
    {"name": "stalls of 0.1 s, probability 0.1", "factors": [1.0, 1.0, 1.0, 1.0], "probability": 0.1},
]
SCHEDULES = [("gpipe", 1, 8), ("1f1b", 1, 8), ("interleaved_1f1b", 2, 8), ("interleaved_zero_bubble", 2, 8)]


def pipeline_rank(
    rank: int, world: int, cases: list[dict[str, Any]], schedules: list[tuple[str, int, int]], iterations: int
) -> dict[str, Any]:
    """Run every schedule in every case; seconds of each iteration on this rank, and the latency of a message."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining import schedules as torch_schedules
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    from facility.exchange.schedules.registry import SCHEDULES as DECLARED

    class Times:
        """What a rank is to sleep, and by how much longer each of its passes took."""

        def __init__(self, emulation: Emulation, factor: float) -> None:
            self.emulation, self.factor = emulation, factor
            self.asked = self.stalls = 0.0
            self.forget()

        def forget(self) -> None:
            self.draws = 0
            self.lost: list[float] = []
            self.late: dict[str, list[float]] = {"pass": [], "weight": []}

        def rest(self, seconds: float, *, stalls: bool) -> None:
            stall = 0.0
            if stalls:
                self.draws += 1
                stall = self.emulation.stall(0, self.draws - 1, stage=rank)
            self.asked += seconds
            self.stalls += stall
            time.sleep(stall + seconds)

        @contextmanager
        def one(self, what: str) -> Iterator[None]:
            """Time one whole pass: its sleep, autograd's work, and what it waits for a core."""
            self.asked = self.stalls = 0.0
            begin = time.perf_counter()
            yield
            lost = time.perf_counter() - begin - self.asked
            self.late[what].append(lost - self.stalls)
            if what == "pass":
                self.lost.append(lost)
            else:
                self.lost[-1] += self.stalls  # the first stage has no part for an input: it stalls in the weights' part

    class TimedStage(PipelineStage):
        """A stage that tells how long its passes took."""

        submod: Sleeper

        def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
            with self.submod.times.one("pass"):
                return super().forward_one_chunk(*arguments, **named)

        def backward_one_chunk(self, *arguments: Any, **named: Any) -> None:
            with self.submod.times.one("pass"):
                super().backward_one_chunk(*arguments, **named)

        def backward_weight_one_chunk(self, *arguments: Any, **named: Any) -> None:
            with self.submod.times.one("weight"):
                super().backward_weight_one_chunk(*arguments, **named)

    class Through(torch.autograd.Function):
        """Sleeps a forward, and in the backward the part for the input."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, times: Times, virtual: int) -> torch.Tensor:
            ctx.times, ctx.virtual = times, virtual
            times.rest(FORWARD * times.factor / virtual, stalls=True)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            ctx.times.rest(BACKWARD / 2 * ctx.times.factor / ctx.virtual, stalls=True)
            return grad.contiguous(), None, None

    class Weight(torch.autograd.Function):
        """Sleeps in the backward the part for the weights."""

        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor, times: Times, virtual: int) -> torch.Tensor:
            ctx.times, ctx.virtual = times, virtual
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
            ctx.times.rest(BACKWARD / 2 * ctx.times.factor / ctx.virtual, stalls=False)
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
    for turn in range(20):
        for a in range(world - 1):
            if rank in (a, a + 1):
                if rank == a:
                    time.sleep(FORWARD)  # who slept begins with cold caches, as between the passes of a pipeline
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
                TimedStage(
                    Sleeper(times, virtual, first=rank + k == 0),
                    rank + k * world,
                    chunks,
                    torch.device("cpu"),
                    input_args=(shape,),
                    output_args=(shape,),
                )
                for k in range(virtual)
            ]
            kind = getattr(torch_schedules, DECLARED.get(schedule).torch_class)
            several = issubclass(kind, PipelineScheduleMulti)
            runner = kind(stages if several else stages[0], micro_batches, loss_fn=lambda y, t: (y - t).sum())
            seconds = []
            for number in range(iterations + 1):  # the first one sets up connections
                if number == 1:
                    times.forget()
                dist.barrier()
                begin = time.perf_counter()
                arguments = (torch.zeros(micro_batches, 8),) if rank == 0 else ()
                target = torch.zeros(micro_batches, 8) if rank == world - 1 else None
                runner.step(*arguments, target=target)
                dist.barrier()
                if number:
                    seconds.append(time.perf_counter() - begin)
            late = {what: statistics.mean(values) if values else 0.0 for what, values in times.late.items()}
            found[f"{case['name']}, {schedule}"] = {"seconds": seconds, "late": late, "lost": times.lost}
    return found


def simulated(
    case: dict[str, Any],
    schedule: tuple[str, int, int],
    ranks: int,
    iterations: int,
    latency: float,
    *,
    late: list[dict[str, float]] | None = None,
    lost: list[list[float]] | None = None,
) -> tuple[float, ...]:
    """What the simulator says of the same iterations.

    `late`: mean seconds by which passes of each rank, and weights' parts that run alone, took longer than asked;
    `lost`: what every single pass took longer, stalls included.
    """
    name, virtual, micro_batches = schedule
    factors = np.tile(np.array(case["factors"][:ranks]), virtual)[:, None] / virtual
    passes = np.zeros((ranks * virtual, 1))
    weights = np.zeros((ranks * virtual, 1))
    if late is not None:
        weights = np.tile([rank["weight"] for rank in late], virtual)[:, None]
        if lost is None:
            passes = np.tile([rank["pass"] for rank in late], virtual)[:, None]
    emulation = Emulation(probability=case["probability"], seconds=0.1, seed=3)
    backward = BACKWARD * factors + passes + weights
    layout = Layout(
        grid=tuple((r,) for r in range(ranks)),
        virtual_stages=virtual,
        schedule=name,
        micro_batches=(micro_batches,),
        forward_seconds=FORWARD * factors + passes,
        backward_seconds=backward,
        weight_share=float(((BACKWARD / 2 * factors + weights) / backward).mean()),
        cut_bytes=np.zeros(ranks * virtual - 1),
        gradient_bytes=np.zeros(ranks * virtual),
        latency=np.full((ranks, ranks), latency),
        bandwidth=np.full((ranks, ranks), 1e9),
        sync="none",
        transport="blocking",
    )

    def stall(replica: int, stage: int, draw: int) -> float:
        return emulation.stall(replica, draw, stage=stage) if lost is None else lost[stage][draw]

    return simulate_layout(layout, iterations=iterations, stall=stall).iterations


def compare(
    ranks: int, iterations: int, cases: list[dict[str, Any]], schedules: list[tuple[str, int, int]]
) -> dict[str, Any]:
    """Real and simulated seconds of an iteration, side by side."""
    found = run_distributed(pipeline_rank, ranks, cases, schedules, iterations, timeout=600)
    latency = statistics.median(f["latency"] for f in found if f["latency"] is not None)
    rows = []
    for case in cases:
        for schedule in schedules:
            mine = [f[f"{case['name']}, {schedule[0]}"] for f in found]
            real = [max(f["seconds"][n] for f in mine) for n in range(iterations)]
            late, lost = [f["late"] for f in mine], [f["lost"] for f in mine]
            traced = simulated(case, schedule, ranks, iterations, latency, late=late, lost=lost)
            measured = simulated(case, schedule, ranks, iterations, latency, late=late)
            asked = simulated(case, schedule, ranks, iterations, latency)
            rows.append(
                {
                    "case": case["name"],
                    "schedule": schedule[0],
                    "real_seconds": round(statistics.mean(real), 4),
                    "simulated_seconds": round(statistics.mean(traced), 4),
                    "error": round(sum(traced) / sum(real) - 1, 4),
                    "error_by_means": round(sum(measured) / sum(real) - 1, 4),
                    "error_by_what_was_asked": round(sum(asked) / sum(real) - 1, 4),
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
    top.add_argument("--iterations", type=int, default=2, help="timed iterations a case (default 2)")
    options = top.parse_args()
    print(json.dumps(compare(options.ranks, options.iterations, CASES, SCHEDULES), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
