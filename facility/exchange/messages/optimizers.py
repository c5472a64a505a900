"""The inner optimizers by name: what `training.optimizer` takes. Reading the names imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from facility.exchange.registry import Declaration, Registry


@dataclass(frozen=True, kw_only=True)
class InnerOptimizer(Declaration):
    """An optimizer that trains at a facility. Its class takes (shards, settings, parameters)."""

    state_bytes: float = 8.0
    """Bytes of state a trained parameter, at most, for predictions of memory and disk."""
    shares_second_moments: bool = False
    """True if it keeps second moments value by value, as AdamW does (`exp_avg_sq`), of all parameters or of some, which
    `optimizer_state: shared` averages."""
    first_moments: tuple[str, ...] = ()
    """Kinds of state that are running means of gradients, which `first_moments: mean` averages."""


OPTIMIZERS = Registry(
    kind="optimizer",
    package="facility.training.optimizers",
    entry_points="crossfed.optimizers",
    declaration=InnerOptimizer,
)
