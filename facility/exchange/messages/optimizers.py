"""The inner optimizers by name: what `training.optimizer` takes. Reading the names imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from facility.exchange.registry import Declaration, Registry


@dataclass(frozen=True, kw_only=True)
class InnerOptimizer(Declaration):
    """An optimizer that trains at a facility. Its class takes (shards, settings, parameters)."""

    state_bytes: float = 8.0
    """Bytes of state a trained parameter, for predictions of memory and disk; where `matrices` says more, of parameters
    whose shape is not known."""
    matrices: str = "moments"
    """What is kept of a matrix: `moments` (`state_bytes` of every parameter), `momentum` (one value of each element of
    a matrix, two of other parameters), or `factors` (a value of each row and of each column, one of each element of a
    vector)."""
    moments_of: str = ""
    """With `momentum`, the own parameter with the patterns of matrices of which two values are kept."""
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
