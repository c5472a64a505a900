"""A Chrome trace of the first steps of a round (open in chrome://tracing or ui.perfetto.dev)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from facility.training.processes.ranks import Ranks

STEPS = 3
"""Steps in a trace."""


class Trace:
    """Records `STEPS` steps to `trace-round-N-rank-R.json`; off unless asked for."""

    def __init__(self, wanted: bool, directory: Path, round: int, ranks: Ranks) -> None:
        self._file = directory / f"trace-round-{round}-rank-{ranks.rank}.json"
        self._left = STEPS
        self._profiler: Any = None
        if wanted:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if ranks.device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.__enter__()

    def step(self) -> None:
        """To be called after every step."""
        self._left -= 1
        if self._left == 0:
            self.close()

    def close(self) -> None:
        if self._profiler is not None:
            self._profiler.__exit__(None, None, None)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._file))
            self._profiler = None
