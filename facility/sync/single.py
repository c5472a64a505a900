"""A single replica: nothing to synchronise."""

from __future__ import annotations

from typing import Any

import torch


class SingleReplica:
    """The synchroniser of one replica: counts steps and never communicates."""

    def __init__(self, steps: int, done: int = 0) -> None:
        self.steps, self.done, self.samples = steps, done, 0.0
        self.pausing, self.step_scale = False, 1.0
        self.members = (0,)

    def wants_more(self) -> bool:
        return self.done < self.steps

    @property
    def remaining(self) -> int | None:
        return self.steps - self.done

    @property
    def progress(self) -> float:
        return float(self.done)

    def ask_to_pause(self) -> None:
        self.pausing = True

    def before_step(self, samples: float) -> None:
        pass

    def reduce_gradients(self, samples: float) -> None:
        pass

    def after_step(self, samples: float) -> None:
        self.done += 1
        self.samples += samples

    def finish(self) -> bool:
        return not self.pausing

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        assert not state, "a single replica keeps nothing between rounds"

    def report(self) -> dict[str, Any]:
        return {"policy": "none", "replicas": 1, "updates": self.done}

    def close(self) -> None:
        pass
