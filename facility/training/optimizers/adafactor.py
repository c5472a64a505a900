"""Adafactor: second moments of matrices as row and column means, and no first moments, for little memory.

N. Shazeer, M. Stern, "Adafactor: adaptive learning rates with sublinear memory cost", ICML 2018, arXiv 1804.04235,
algorithms 4 and 5, as in `torch.optim.Adafactor`: steps are relative to the root mean square of each parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from facility.exchange.messages.optimizers import InnerOptimizer
from facility.exchange.messages.settings import TrainingSettings
from facility.exchange.registry import Parameter
from facility.training.optimizers.groups import decay_groups, sum_over_shards
from facility.training.shards import LocalShard

DECLARATION = InnerOptimizer(
    name="adafactor",
    summary="row and column means instead of moments",
    citation="Shazeer and Stern 2018, arXiv 1804.04235",
    implementation="Adafactor",
    parameters=(
        Parameter(name="beta2_decay", default=-0.8, at_most=0, text="Second moments move by step ** this."),
        Parameter(name="clip_threshold", default=1.0, at_least=1, text="Largest root mean square of an update."),
        Parameter(
            name="smallest_scale", default=0.001, above=0, text="Least root mean square that a step is taken of."
        ),
    ),
    needs=("a learning rate that is relative to the parameters' size, 1e-2 in the paper",),
    state_bytes=0.1,
    matrices="factors",
)
ROWS, COLUMNS, VALUES = "row_var", "col_var", "variance"


class Adafactor(torch.optim.Optimizer):
    """Adafactor over this rank's rows; means over rows and norms are summed over the ranks that share a matrix."""

    def __init__(self, parts: Sequence[LocalShard], settings: TrainingSettings, values: Mapping[str, Any]) -> None:
        self.parts, self.values = list(parts), values
        groups = decay_groups(parts, settings.weight_decay)
        super().__init__(groups, {"lr": settings.learning_rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step; four sums over the ranks, whatever the number of parameters.

        Updates are worked out twice, for their norms and to be applied: all of them at once would take as much memory
        as the gradients.
        """
        parts = [part for part in self.parts if part.tensor.grad is not None]
        decay = {id(t): g["weight_decay"] for g in self.param_groups for t in g["params"]}
        rate = self.param_groups[0]["lr"]
        sizes = self._root_mean_squares((part.tensor for part in parts), parts)
        totals = self._move_estimates(parts)
        norms = self._root_mean_squares(map(self._update, parts, totals), parts)
        for part, total, size, norm in zip(parts, totals, sizes, norms, strict=True):
            relative = min(rate, 1 / float(self.state[part.tensor]["step"]) ** 0.5)
            step = max(self.values["smallest_scale"], size) * relative
            if decay[id(part.tensor)]:
                part.tensor.mul_(1 - rate * decay[id(part.tensor)])
            part.tensor.add_(self._update(part, total), alpha=-step / max(1.0, norm / self.values["clip_threshold"]))

    def _move_estimates(self, parts: Sequence[LocalShard]) -> list[torch.Tensor]:
        """Move the second moments by the gradients; the sum of each matrix's row means over the ranks."""
        columns = []
        for part in parts:
            gradient = part.tensor.grad
            assert gradient is not None
            if len(part.shape) == 2:
                columns.append(gradient.square().sum(0, keepdim=True))
            else:
                columns.append(torch.zeros(1, device=gradient.device))
        sum_over_shards(columns, parts)
        totals = []
        for part, column in zip(parts, columns, strict=True):
            gradient, state = part.tensor.grad, self._begun(part)
            assert gradient is not None
            state["step"] += 1
            amount = float(state["step"]) ** self.values["beta2_decay"]
            if len(part.shape) < 2:
                state[VALUES].lerp_(gradient.square(), amount)
                totals.append(torch.zeros(1, device=gradient.device))
                continue
            state[ROWS].lerp_(gradient.square().mean(-1, keepdim=True), amount)
            column = column / part.shape[0] if len(part.shape) == 2 else gradient.square().mean(-2, keepdim=True)
            state[COLUMNS].lerp_(column, amount)
            totals.append(state[ROWS].sum().reshape(1))
        sum_over_shards(totals, parts)
        return totals

    def _update(self, part: LocalShard, total: torch.Tensor) -> torch.Tensor:
        """The gradient over the root of the second moments, of the rows held here."""
        epsilon = torch.finfo(part.tensor.dtype).eps
        assert part.tensor.grad is not None
        return self._rebuilt(part, total).clamp_(min=epsilon * epsilon).rsqrt_().mul_(part.tensor.grad)

    def _rebuilt(self, part: LocalShard, total: torch.Tensor) -> torch.Tensor:
        state = self.state[part.tensor]
        if len(part.shape) < 2:
            return state[VALUES].clone()
        mean = total / part.shape[0] if len(part.shape) == 2 else state[ROWS].mean(-2, keepdim=True)
        return (state[ROWS] @ state[COLUMNS]).div_(mean.clamp(min=torch.finfo(part.tensor.dtype).eps))

    def _root_mean_squares(self, values: Iterable[torch.Tensor], parts: Sequence[LocalShard]) -> list[float]:
        """Root mean squares of whole parameters, whose rows several ranks hold; `values` are read one by one."""
        squares = [torch.linalg.vector_norm(value, dtype=torch.float64).square().reshape(1) for value in values]
        sum_over_shards(squares, parts)
        return [(float(s) / torch.Size(part.shape).numel()) ** 0.5 for s, part in zip(squares, parts, strict=True)]

    def kept(self, name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """Row and column means of a matrix, a vector's second moments."""
        if len(shape) < 2:
            return {VALUES: shape}
        return {ROWS: (*shape[:-1], 1), COLUMNS: (*shape[:-2], 1, shape[-1])}

    def shards(self, part: LocalShard) -> list[LocalShard]:
        """What is kept of the rows held here; a matrix's column means lie at every rank, and the first writes them."""
        state, shapes = self._begun(part), self.kept(part.name, part.shape)
        found = []
        for kind, shape in shapes.items():
            everywhere = kind == COLUMNS and len(part.shape) == 2
            found.append(
                dataclasses.replace(
                    part,
                    name=f"{kind}.{part.name}",
                    shape=shape,
                    first=0 if everywhere else part.first,
                    tensor=state[kind],
                    copy=part.copy or (everywhere and part.first > 0),
                )
            )
        return found

    def _begun(self, part: LocalShard) -> dict[str, Any]:
        """The state of a parameter, made as zeros where there is none."""
        state = self.state[part.tensor]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            for kind, shape in self.kept(part.name, part.shape).items():
                sharded = not (kind == COLUMNS and len(part.shape) == 2)
                rows = (len(part.tensor), *shape[1:]) if sharded and part.shape else shape
                state[kind] = torch.zeros(rows, device=part.tensor.device, dtype=part.tensor.dtype)
        return state
