"""The sizes of model that `federated_quality.py` trains, by width, each with rates of its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Size:
    """A Llama with tied embeddings, and how its base is pretrained."""

    parameters: int
    """About so many."""
    layers: int = 2
    heads: int = 4
    pretraining_steps: int = 500
    pretraining_rate: float = 2e-3
    rate: float = 2e-3
    """Learning rate at which arms are compared with each other."""
    rates: tuple[float, ...] = (4e-3, 8e-3)
    """Further ones, for the best of each against the best of the other."""


SIZES = {
    64: Size(parameters=160_000),
    128: Size(parameters=530_000),
    # The best rate goes about as 1 / width (Yang et al. 2022, arXiv 2203.03466): 8e-3 at 64 is 1.3e-3 here.
    384: Size(
        parameters=11_000_000,
        layers=6,
        heads=6,
        pretraining_steps=1000,
        pretraining_rate=1e-3,
        rate=1e-3,
        rates=(5e-4, 2e-3, 4e-3),
    ),
}


def size_of(width: int) -> Size:
    """Another width has two layers, whose matrices grow with its square."""
    return SIZES.get(width) or Size(parameters=160_000 * width**2 // 64**2)
