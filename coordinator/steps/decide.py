"""Whether another round follows: a pure function of the history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.config.settings import CoordinatorSettings


@dataclass(frozen=True, kw_only=True)
class Decision:
    proceed: bool
    reason: str
    """`go on`, or why not."""
    broken: bool = False
    """True when a person must look: the loss diverged."""


def decide(settings: CoordinatorSettings, losses: Sequence[float | None]) -> Decision:
    """Decide after round `len(losses) - 1`.

    `losses[r]`: mean validation loss (nats per token) of the model that round r received; None when no facility told.
    """
    stop = settings.stop
    current = losses[-1]
    if current is not None and not math.isfinite(current):
        return Decision(proceed=False, reason=f"the global loss is {current}", broken=True)
    known = [(number, loss) for number, loss in enumerate(losses) if loss is not None and math.isfinite(loss)]
    best_round, best = min(known, key=lambda pair: (pair[1], pair[0])) if known else (0, math.inf)
    if current is not None and stop.divergence and current > best + stop.divergence:
        return Decision(
            proceed=False,
            reason=f"the global loss {current:.4f} is more than {stop.divergence} above the best ({best:.4f}, "
            f"received by round {best_round})",
            broken=True,
        )
    if current is not None and stop.target_perplexity and math.exp(current) <= stop.target_perplexity:
        return Decision(
            proceed=False,
            reason=f"the global perplexity {math.exp(current):.3f} reached the target {stop.target_perplexity}",
        )
    if stop.patience and known and len(losses) - 1 - best_round >= stop.patience:
        return Decision(
            proceed=False,
            reason=f"no better global perplexity for {stop.patience} rounds (best {math.exp(best):.3f}, received by "
            f"round {best_round})",
        )
    if len(losses) >= settings.rounds:
        return Decision(proceed=False, reason=f"all {settings.rounds} rounds are done")
    return Decision(proceed=True, reason="go on")
