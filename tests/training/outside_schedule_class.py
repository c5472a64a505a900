"""What runs the schedule of `outside_schedule`; apart from it, so that the declaration needs no torch."""

from __future__ import annotations

import sys
from typing import Any

from torch.distributed.pipelining.schedules import ScheduleGPipe


class ForwardsFirst(ScheduleGPipe):
    """GPipe that says on stderr that it runs."""

    def step(self, *args: Any, **kwargs: Any) -> Any:
        print("forwards first", file=sys.stderr)
        return super().step(*args, **kwargs)
