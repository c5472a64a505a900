"""Orthogonalising matrices whose rows several ranks hold: gather, orthogonalise, scatter.

The iteration is the quintic one of K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024,
kellerjordan.github.io/posts/muon, operation by operation as in `torch.optim.Muon`. Matrices are dealt to the ranks in
turn, so that each rank holds one whole matrix at a time and the work is shared, as in microsoft/dion.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from facility.training.optimizers.groups import group_of
from facility.training.shards import LocalShard

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7


def orthogonalised(matrix: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """About the nearest matrix with equal singular values, computed in `dtype`."""
    a, b, c = COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    value = matrix.to(dtype)
    value = value.T if tall else value
    value = value / value.norm().clamp(min=EPSILON)
    for _ in range(steps):
        gram = value @ value.T
        value = torch.addmm(value, torch.addmm(gram, gram, gram, beta=b, alpha=c), value, beta=a)
    return value.T if tall else value


def orthogonalise_shards(
    parts: Sequence[LocalShard], values: Sequence[torch.Tensor], steps: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """The rows held here of every orthogonalised matrix; `values[i]` holds rows of a matrix of `parts[i].shape`."""
    found: dict[int, torch.Tensor] = {}
    dealt: dict[dist.ProcessGroup, list[int]] = {}
    for number, (part, value) in enumerate(zip(parts, values, strict=True)):
        if (group := group_of(part)) is None:
            found[number] = orthogonalised(value, steps, dtype)
        else:
            dealt.setdefault(group, []).append(number)
    for group, numbers in dealt.items():
        size = dist.get_world_size(group)
        for start in range(0, len(numbers), size):
            batch = numbers[start : start + size]
            shapes = [parts[number].shape for number in batch]
            rows = _together([values[number] for number in batch], shapes, group, steps, dtype)
            found |= dict(zip(batch, rows, strict=True))
    return [found[number] for number in range(len(parts))]


def _together(
    values: Sequence[torch.Tensor],
    shapes: Sequence[tuple[int, ...]],
    group: dist.ProcessGroup,
    steps: int,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """At most as many matrices as the group has ranks: matrix i is whole at rank i for as long as it is worked on."""
    size, me = dist.get_world_size(group), dist.get_rank(group)
    whole: torch.Tensor | None = None
    for owner, (value, shape) in enumerate(zip(values, shapes, strict=True)):
        pieces = _pieces(shape, size, value) if owner == me else None
        dist.gather(_padded(value, shape, size), pieces, group=group, group_dst=owner)
        if pieces is not None:
            whole = torch.cat(pieces)[: shape[0]]
    done = None if whole is None else orthogonalised(whole, steps, dtype).to(values[0].dtype)
    rows = []
    for owner, (value, shape) in enumerate(zip(values, shapes, strict=True)):
        mine, pieces = _padded(torch.zeros_like(value), shape, size), None
        if owner == me and done is not None:
            length = -(-shape[0] // size)
            filled = done.new_zeros((size * length, shape[1]))
            filled[: shape[0]] = done
            pieces = list(filled.split(length))
        dist.scatter(mine, pieces, group=group, group_src=owner)
        rows.append(mine[: len(value)])
    return rows


def _padded(value: torch.Tensor, shape: tuple[int, ...], size: int) -> torch.Tensor:
    """The rows, with zeros up to the length of every rank's."""
    length = -(-shape[0] // size)
    if len(value) == length:
        return value.contiguous()
    filled = value.new_zeros((length, shape[1]))
    filled[: len(value)] = value
    return filled


def _pieces(shape: tuple[int, ...], size: int, like: torch.Tensor) -> list[torch.Tensor]:
    length = -(-shape[0] // size)
    return [like.new_empty((length, shape[1])) for _ in range(size)]
