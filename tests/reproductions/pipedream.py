"""A pipeline that never flushes: 1F1B with one update per micro-batch, weights stashed.

Narayanan et al., "PipeDream", SOSP 2019 (1F1B-AS); the schedule on which SDPipe synchronises pipelines. Stage s of S
starts S - s - 1 forwards ahead, then alternates one forward and one backward. When the first stage's policy wants no
more steps it sends an end down the pipeline, and all stages make the same number of updates.

A stage's synchroniser exchanges right after its own update, in groups of its own stage. Only one stage at a time may
hold pipelines back (`tests.reproductions.permission`), so stages of different pipelines never wait for each other in a
circle.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import torch
import torch.distributed as dist

from facility.sync.protocol import Synchroniser


class StageWork(Protocol):
    """What one stage computes; `micro_batch` counts from 0."""

    def forward(self, micro_batch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        """Activations for the next stage (None from the last, which keeps its loss)."""

    def backward(self, micro_batch: int, received: torch.Tensor | None) -> torch.Tensor | None:
        """Gradient for the previous stage (None from the first); gradients accumulate on the parameters."""

    def update(self, micro_batch: int) -> None:
        """Take the optimizer's step and clear gradients."""


def run(
    work: StageWork,
    sync: Synchroniser,
    group: dist.ProcessGroup,
    *,
    activation: torch.Tensor,
    samples: float = 1.0,
    exchange_first: bool = False,
) -> int:
    """Run this rank's stage until the policy wants no more; returns the updates made.

    `group` holds the ranks of this pipeline in the order of stages; `activation` shows shape, dtype and device of
    what travels (both ways), which must be the same between all stages. `exchange_first` sends the gradient to the
    previous stage only after this stage's exchange, as SDPipe's artefact does; by default it goes at once.
    """
    stage, stages = group.rank(), group.size()
    first, last = stage == 0, stage == stages - 1
    in_flight: deque[int] = deque()
    sent: deque[tuple[object, torch.Tensor]] = deque()
    ended = False
    started = 0

    def send(tensor: torch.Tensor, to: int, tag: int) -> None:
        tensor = tensor.detach().contiguous()
        sent.append((group.send([tensor], to, tag), tensor))
        while len(sent) > 2 * stages:
            sent.popleft()[0].wait()  # type: ignore[attr-defined]

    def receive(like: torch.Tensor, source: int, tag: int) -> torch.Tensor:
        tensor = torch.empty_like(like)
        group.recv([tensor], source, tag).wait()
        return tensor

    flag = torch.zeros(1)

    def forward() -> None:
        nonlocal ended, started
        if first:
            # Its own updates tell the policy's wish; what is in flight is still finished.
            remaining = sync.remaining
            more = sync.wants_more() and (remaining is None or len(in_flight) < remaining)
        else:
            more = bool(receive(flag, stage - 1, 0).item())
        if not last:
            send(torch.tensor([float(more)]), stage + 1, 0)
        if not more:
            ended = True
            return
        received = None if first else receive(activation, stage - 1, 1)
        result = work.forward(started, received)
        if not last:
            assert result is not None
            send(result, stage + 1, 1)
        in_flight.append(started)
        started += 1

    def backward() -> None:
        micro_batch = in_flight.popleft()
        received = None if last else receive(activation, stage + 1, 2)
        gradient = work.backward(micro_batch, received)
        assert first or gradient is not None
        if gradient is not None and not first and not exchange_first:
            send(gradient, stage - 1, 2)
        sync.before_step(samples)
        sync.reduce_gradients(samples)
        work.update(micro_batch)
        sync.after_step(samples)
        if gradient is not None and not first and exchange_first:
            send(gradient, stage - 1, 2)

    for _ in range(stages - stage - 1):
        if not ended:
            forward()
    while not ended:
        forward()
        if not ended:
            backward()
    while in_flight:
        backward()
    while sent:
        sent.popleft()[0].wait()  # type: ignore[attr-defined]
    return started
