"""Seconds of a unit whose weights are frozen, and of adapters beside them, from what a whole model's training took.

`facility.measure` times units all of whose weights are trained. A frozen matrix still computes its output and the
gradient of its input, not its own gradient; an adapter adds two narrow products and reads and writes what its layer
does. Operations are counted and the measured seconds scaled by them: modelled, not measured. Norms, activations and
other work between the products are taken to shrink as the products do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.problem.problem import Unit
from facility.exchange.checkpoints.adapters import is_factor
from facility.exchange.memory.units import Dimensions, Weight

FORWARD_MOVED, BACKWARD_MOVED = 70, 160
"""What moving a value into or out of an adapter costs, in operations of the layer's products. Measured on a CPU core
(Llama blocks of width 256 to 1,024, rank 8, 256 tokens): 58 to 170 forward, 155 to 230 backward."""


@dataclass(frozen=True, kw_only=True)
class Operations:
    """Floating-point operations of a unit's products, a token."""

    forward: float
    backward: float


def with_frozen(units: Sequence[Unit], weights: Sequence[Weight], dimensions: Dimensions, tokens: int) -> list[Unit]:
    """The measured units as they run with these weights; unchanged where all weights are trained.

    `tokens`: of a sequence.
    """
    held: list[list[Weight]] = [[] for _ in units]
    for one in weights:
        held[min(one.unit, len(units) - 1)].append(one)
    if not any(_is_matrix(one) for one in held[-1]):  # the head multiplies with the embedding
        tied = all(one.trained for one in held[0])
        shape = (dimensions.vocabulary, dimensions.hidden)
        held[-1].append(Weight(name="", shape=shape, unit=len(units) - 1, trained=tied))
    found, below = [], False
    for number, (unit, own) in enumerate(zip(units, held, strict=True)):
        attention = 2.0 * tokens * dimensions.hidden if 0 < number < len(units) - 1 else 0.0
        found.append(_scaled(unit, own, attention, below))
        below = below or any(one.trained for one in own)
    return found


def _scaled(unit: Unit, held: Sequence[Weight], attention: float, below: bool) -> Unit:
    """`below`: something before this unit is trained, so that the gradient of its input is needed."""
    base = [one for one in held if not is_factor(one.name)]
    if all(one.trained for one in held):
        return unit
    whole = operations(base, attention, trained=True)
    real = operations(held, attention, trained=False)
    needed = below or any(one.trained for one in held)
    forward = real.forward / whole.forward if whole.forward else 1.0
    backward = real.backward / whole.backward if needed and whole.backward else float(needed)
    updated = sum(one.count for one in held if one.trained) / sum(one.count for one in base)
    return replace(
        unit,
        forward_seconds=unit.forward_seconds * forward,
        forward_overhead_seconds=unit.forward_overhead_seconds * forward,
        backward_seconds=unit.backward_seconds * backward,
        backward_overhead_seconds=unit.backward_overhead_seconds * backward,
        update_seconds=unit.update_seconds * min(1.0, updated),
    )


def _is_matrix(one: Weight) -> bool:
    """Whether it is multiplied with: not norms and biases, nor an embedding, which looks up."""
    return len(one.shape) > 1 and one.unit > 0


def operations(held: Sequence[Weight], attention: float, *, trained: bool) -> Operations:
    """Operations a token of the products with `held` and of attention; `trained`: as if all weights were."""
    forward, backward = attention, 2 * attention
    for one in held:
        if not _is_matrix(one):
            continue
        forward += 2 * one.count
        backward += 4 * one.count if one.trained or trained else 2 * one.count
        if is_factor(one.name):
            moved = max(one.shape)
            forward, backward = forward + FORWARD_MOVED * moved, backward + BACKWARD_MOVED * moved
    return Operations(forward=forward, backward=backward)
