"""Correction of drift: every step is moved by the mean of all facilities' walks minus this facility's own.

S. P. Karimireddy et al., "SCAFFOLD: Stochastic controlled averaging for federated learning", 2020, arXiv 1910.06378,
option II, on the optimizer's steps in place of gradients. A walk is what a facility's steps changed in a round, without
the correction, over the sum of their learning rates; a step of learning rate r adds r (mean - own). In the weighted
mean over the facilities the corrections cancel: they walk closer together, and where to is not changed.

The own walk is kept with the optimizer's state of its round; the mean comes with the model and names the round whose
walk of this facility it holds (`facility.exchange.checkpoints.mean_walk`).

A facility that lies can put any vector into the mean, and others would follow it at every step. So a correction that
is far longer than the facility's own walk is not applied. The coordinator sees that, and the mean restarts from zero.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from facility.exchange.checkpoints.checkpoint import Checkpoint, open_checkpoint
from facility.exchange.checkpoints.conversion import Conversion
from facility.exchange.checkpoints.mean_walk import SCALE, has_mean_walk, open_mean_walk
from facility.exchange.errors import CheckpointError
from facility.exchange.messages.drift import DriftReport
from facility.training.request import RoundRequest
from facility.training.shards import LocalShard, ShardReader
from facility.training.state import state

KIND = "walk"
"""Of the tensors in the state directory."""
LONGEST = 3.0
"""L2 norm of a correction over that of the own walk, at most. Facilities with unlike data were seen at 0.3 to 1.4."""


class DriftCorrection:
    """The correction of one round on one rank, and after it the walk, in the same memory."""

    def __init__(self, parts: Sequence[LocalShard], *, rates: float = 0.0) -> None:
        """`rates`: of the steps before an interruption."""
        self.parts, self.rates = parts, rates
        sizes = [part.tensor.numel() for part in parts]
        device = parts[0].tensor.device if parts else torch.device("cpu")
        self.vector = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        """The correction of each value over the learning rate of a step; after `finish` the walk."""
        pieces = self.vector.split(sizes)
        self.pieces = [piece.view(part.tensor.shape) for piece, part in zip(pieces, parts, strict=True)]
        self.corrects = False
        self.since: int | None = None
        """The round whose own walk the mean holds, which is needed until the mean holds a later one."""
        self.reason = ""
        self.squares = self.own = self.walked = 0.0
        """Squared norms of the correction, of the walk in it and of the new one, of what this rank holds."""

    @torch.no_grad()
    def begin(self, request: RoundRequest, conversion: Conversion | None, names: Iterable[str]) -> None:
        """Read the mean walk and the facility's own. `names`: of all parameters that are trained, on any rank.

        Raises `CheckpointError` for a mean that cannot be used.
        """
        own, self.since, self.reason = own_walk(request, names)
        if own is None:
            return
        checkpoint, _ = open_mean_walk(request.model)
        with ShardReader(checkpoint, conversion) as mean, ShardReader(own) as walks:
            for part, piece in zip(self.parts, self.pieces, strict=True):
                if not is_in(part.name, checkpoint, conversion) or not part.tensor.numel():
                    continue
                mean.fill(dataclasses.replace(part, tensor=piece))
                if not bool(torch.isfinite(piece).all()):
                    raise CheckpointError(f"{checkpoint.directory}: {part.name!r} holds a value that is not a number")
                walk = torch.empty_like(piece)
                walks.fill(dataclasses.replace(part, name=f"{KIND}.{part.name}", tensor=walk))
                piece.div_(SCALE).sub_(walk)
                self.own += 0.0 if part.copy else float(walk.double().square().sum())
        self.corrects = True
        self.squares = self._squares()

    @torch.no_grad()
    def hold_back(self, squares: float, own: float) -> None:
        """Correct nothing where the correction is far longer than the own walk; both squared, summed over the ranks."""
        if self.corrects and squares > LONGEST**2 * own:
            times = math.sqrt(squares / own) if own > 0 else math.inf
            self.reason = (
                f"the correction would be {times:.3g} times as long as this facility's own walk, allowed are "
                f"{LONGEST:g}: no correction in this round"
            )
            self.vector.zero_()
            self.corrects, self.since, self.squares = False, None, 0.0

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Correct one step of the learning rate `rate`, which was just taken."""
        self.rates += rate
        if self.corrects and self.parts:
            torch._foreach_add_([part.tensor for part in self.parts], self.pieces, alpha=rate)

    @torch.no_grad()
    def finish(self, request: RoundRequest, received: Checkpoint, conversion: Conversion | None) -> None:
        """Put the walk in the correction's place: what was walked from where the round began, without corrections."""
        unsent = ShardReader(open_checkpoint(request.unsent), conversion) if request.unsent is not None else None
        with ShardReader(received, conversion) as begun, unsent or nullcontext():
            for part, piece in zip(self.parts, self.pieces, strict=True):
                start = dataclasses.replace(part, tensor=torch.empty_like(piece))
                begun.fill(start)
                if unsent is not None:
                    unsent.add(start, request.unsent_share)
                piece.copy_((part.tensor - start.tensor) / self.rates - piece)
        self.walked = self._squares()

    def report(self, squares: float, walked: float) -> DriftReport:
        """`squares`, `walked`: summed over the ranks."""
        share = math.sqrt(squares / walked) if self.corrects and walked > 0 else 0.0
        return DriftReport(rates=self.rates, corrected=self.corrects, share=share, reason=self.reason)

    def _squares(self) -> float:
        """Squared norm of the vector, without the parts that are another rank's."""
        pairs = zip(self.parts, self.pieces, strict=True)
        return math.fsum(float(piece.double().square().sum()) for part, piece in pairs if not part.copy)


def is_in(name: str, checkpoint: Checkpoint, conversion: Conversion | None) -> bool:
    """Whether a parameter is in the checkpoint, whole or in pieces."""
    if conversion is not None and name in conversion.pieces:
        return all(piece in checkpoint.tensors for piece in conversion.pieces[name].tensors)
    return name in checkpoint.tensors


def own_walk(request: RoundRequest, names: Iterable[str]) -> tuple[Checkpoint | None, int | None, str]:
    """This facility's walk that the received mean holds, the round it is of, and why there is a correction or none."""
    if not has_mean_walk(request.model):
        return None, None, "the model brings no mean walk: no correction in this round"
    _, rounds = open_mean_walk(request.model)
    number = rounds.get(request.settings.facility)
    if number is None or number >= request.round:
        return None, None, "the mean walk holds none of this facility: its correction begins in the next round"
    path: Path = request.state / f"round-{number}"
    found, reason = state.read_state_of(path, request.settings)
    if found is None:
        return None, None, f"the mean walk holds that of round {number}, and {reason}: no correction in this round"
    own = open_checkpoint(path)
    if any(f"{KIND}.{name}" not in own.tensors for name in names):
        return None, None, f"{path} holds no walk of every parameter: no correction in this round"
    return own, number, f"corrected by the mean walk, which holds this facility's of round {number}"
