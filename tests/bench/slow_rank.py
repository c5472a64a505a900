"""`facility.train` on a rank that is slower than it is: every unit of the model sleeps before it computes.

    SLOW_FACTORS=1,2,4,1 SLOW_UNITS='[[0.001, 0.002], ...]' python -m tests.bench.slow_rank RUNS.json

RUNS.json: [{"port": 1234, "arguments": [...]}, ...], runs of facility.train one after the other in the same processes.
SLOW_UNITS: [forward, backward] seconds a sequence of every unit on a device of factor 1. The trainer's code is as it
is; its stages are wrapped, so that what it computes and sends stays the same. The rank's own number chooses its
factor.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NEEDED = ("SLOW_FACTORS", "SLOW_UNITS")


@functools.cache
def factor() -> float:
    """How many times slower this rank is."""
    return [float(one) for one in os.environ["SLOW_FACTORS"].split(",")][int(os.environ.get("RANK", "0"))]


@functools.cache
def units() -> list[list[float]]:
    """[forward, backward] seconds of every unit."""
    return json.loads(os.environ["SLOW_UNITS"])


class Slow(torch.autograd.Function):
    """The identity; its backward sleeps."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, None


def seconds(first: int, end: int, sequences: int) -> tuple[float, float]:
    """Forward and backward of units [first, end) here."""
    return tuple(factor() * sequences * sum(unit[side] for unit in units()[first:end]) for side in (0, 1))  # type: ignore[return-value]


def slowed() -> None:
    """Wrap the trainer's stages, and its model where it is whole."""
    from facility.training.parallel.compute import Whole
    from facility.training.parallel.split import Stage

    run, whole = Stage.forward, Whole._forward

    def forward(self: Stage, value: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        ahead, back = seconds(self.first, self.end, len(value))
        if torch.is_grad_enabled():
            time.sleep(ahead)
        output = run(self, value, **kwargs)
        return Slow.apply(output, back) if torch.is_grad_enabled() else output

    def forward_whole(self: Whole, batch: Any, model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor, Any]:
        ahead, back = seconds(0, len(units()), len(batch.targets))
        if torch.is_grad_enabled():
            time.sleep(ahead)
        loss, targets, output = whole(self, batch, model)
        return Slow.apply(loss, back) if torch.is_grad_enabled() else loss, targets, output

    Stage.forward = forward  # type: ignore[method-assign]
    Whole._forward = forward_whole  # type: ignore[method-assign]


def runs(file: Path) -> int:
    """Every run, each with a process group of its own; the first failure ends them."""
    from facility.train import main

    for run in json.loads(file.read_text()):
        os.environ["MASTER_PORT"] = str(run["port"])
        code = int(main(run["arguments"]))
        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        if code:
            return code
    return 0


def asked() -> Path:
    """The file of the runs, from the command line; exits where it or a variable is missing."""
    p = argparse.ArgumentParser(prog="python -m tests.bench.slow_rank", description=(__doc__ or "").splitlines()[0])
    p.add_argument("runs", type=Path, metavar="RUNS.json", help="runs of facility.train, one after the other")
    given = p.parse_args()
    if missing := [name for name in NEEDED if name not in os.environ]:
        p.error(f"found no {' and no '.join(missing)} in the environment, expected what the module's docstring says")
    return given.runs


if __name__ == "__main__":
    from facility.training.processes.ranks import run_and_exit

    file = asked()
    slowed()
    run_and_exit(functools.partial(runs, file))
