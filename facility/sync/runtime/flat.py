"""Many tensors as one flat float32 vector and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.distributed.tensor import DTensor


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a possibly sharded tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Flat:
    """A fixed list of tensors seen as one vector."""

    def __init__(self, tensors: Iterable[torch.Tensor], device: torch.device) -> None:
        # `.data`: writing is not seen by autograd, which may hold a forward pass whose weights are stashed.
        self.tensors = [local_shard(t.detach()).data for t in tensors]
        self.device = device
        self.size = sum(t.numel() for t in self.tensors)

    @property
    def bytes(self) -> int:
        """Bytes of the vector."""
        return 4 * self.size

    def pack(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """The tensors' values in a new vector, or in `out`."""
        out = torch.empty(self.size, dtype=torch.float32, device=self.device) if out is None else out
        for tensor, piece in zip(self.tensors, self.pieces(out), strict=True):
            piece.copy_(tensor)
        return out

    def scale(self, vector: torch.Tensor, factors: Sequence[float]) -> None:
        """Multiply each tensor's piece of a packed vector by its factor."""
        if len(set(factors)) == 1:
            vector.mul_(factors[0])
            return
        for piece, factor in zip(self.pieces(vector), factors, strict=True):
            piece.mul_(factor)

    def unpack(self, vector: torch.Tensor) -> None:
        """Write the vector into the tensors."""
        for tensor, piece in zip(self.tensors, self.pieces(vector), strict=True):
            tensor.copy_(piece)

    def pieces(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Each tensor's part of the vector, in its shape, sharing memory with it."""
        return [
            piece.view(tensor.shape)
            for piece, tensor in zip(vector.split([t.numel() for t in self.tensors]), self.tensors, strict=True)
        ]


def local_gradients(parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Local gradients; a parameter without one gets zeros, so that every replica exchanges the same shapes."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return [local_shard(p.grad) for p in parameters]  # type: ignore[arg-type]


def begin_state(optimizer: torch.optim.Optimizer | None) -> None:
    """Give an optimizer that has made no step the state it would begin with: shapes that peers can exchange."""
    if optimizer is None or optimizer.state:
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [(p.grad, p.detach().clone()) for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for parameter, (gradient, value) in zip(parameters, kept, strict=True):
        parameter.grad = gradient
        parameter.data.copy_(value)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    set_to_zero(optimizer_moments(optimizer))


def set_to_zero(tensors: Iterable[torch.Tensor]) -> None:
    """Set all values to 0."""
    for tensor in tensors:
        tensor.zero_()


def optimizer_moments(optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    """The optimizer's floating-point state, local, in the order of its parameters (empty before its first step)."""
    found = []
    for group in optimizer.param_groups if optimizer is not None else ():
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})  # type: ignore[union-attr]
            values = [state[key] for key in sorted(state) if torch.is_tensor(state[key])]
            found += [local_shard(value) for value in values if value.is_floating_point()]
    return found
