"""Run several rounds one after the other in the processes of one start: starting Python is most of a pico round."""

from __future__ import annotations

import contextlib
import io
import os
import signal
from pathlib import Path
from typing import Any

import torch

from tests.distributed import run_distributed
from tests.training.federation import write_settings

TWO: dict[str, dict[str, Any]] = {
    "fsdp": {"layout": {}},
    "keep-weights": {"layout": {"sharding": "SHARD_GRAD_OP"}},
    "replicas": {"layout": {"sharding": "NO_SHARD"}},
    "gpipe": {"layout": {"stages": 2, "schedule": "gpipe", "units": [[0, 2], [2, 6]]}},
    "1f1b": {"layout": {"stages": 2, "schedule": "1f1b", "units": [[0, 4], [4, 6]]}},
    "interleaved": {
        "layout": {
            "stages": 2,
            "virtual_stages": 2,
            "schedule": "interleaved_1f1b",
            "units": [[0, 1], [1, 4], [4, 5], [5, 6]],
        }
    },
    "zero-bubble": {
        "layout": {
            "stages": 2,
            "virtual_stages": 2,
            "schedule": "interleaved_zero_bubble",
            "units": [[0, 2], [2, 3], [3, 5], [5, 6]],
        }
    },
}
FOUR: dict[str, dict[str, Any]] = {
    "hybrid": {"layout": {"replicas": 2}},
    "pipeline-x-fsdp": {"layout": {"stages": 2, "units": [[0, 3], [3, 6]]}},
    "interleaved-x-fsdp": {"layout": {"stages": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b"}},
    "zero-bubble-x-fsdp": {"layout": {"stages": 2, "virtual_stages": 2, "schedule": "interleaved_zero_bubble"}},
    "pipeline-x-replicas": {"layout": {"stages": 2, "replicas": 2, "units": [[0, 1], [1, 6]]}},
    "four-uneven-stages": {"layout": {"stages": 4, "units": [[0, 1], [1, 2], [2, 5], [5, 6]]}},
}


def run_rounds(rank: int, world: int, cases: list[tuple[str, list[str]]]) -> list[tuple[str, int, str]]:
    """Call the trainer's `main` with each case's arguments; (name, exit code, what it said)."""
    from facility.exchange.errors import exit_on_error
    from facility.train import main

    os.environ["LOCAL_WORLD_SIZE"] = str(world)
    results = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)}
    for name, arguments in cases:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = exit_on_error(lambda arguments=arguments: main(arguments))  # type: ignore[misc]
        results.append((name, int(code), said.getvalue()))
    torch.use_deterministic_algorithms(False)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return results


def rounds_in(cases: list[tuple[str, list[str]]], *, ranks: int = 1, expect: int | None = 0) -> dict[str, list[str]]:
    """Run the cases on so many ranks; what every rank said, by case. Every rank must end every case with `expect`, and
    none with a warning of a library among its lines."""
    results = [run_rounds(0, 1, cases)] if ranks == 1 else run_distributed(run_rounds, ranks, cases, timeout=240)
    said: dict[str, list[str]] = {name: [] for name, _ in cases}
    for of_rank in results:
        for name, code, text in of_rank:
            assert expect is None or code == expect, f"{name} ended with {code}:\n{text}"
            assert "Warning" not in text, f"{name} shows its users:\n{text}"
            said[name].append(text)
    return said


def arguments(directory: Path, model: Path, dataset: Path, round: int = 0, **training: Any) -> list[str]:
    """Arguments of one round whose settings, state and update lie in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = write_settings(directory / "settings.json", **training)
    return [
        "--model",
        str(model),
        "--dataset",
        str(dataset),
        "--settings",
        str(settings),
        "--round",
        str(round),
        "--out",
        str(directory / "out"),
        "--state",
        str(directory / "state"),
    ]
