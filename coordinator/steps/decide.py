"""Whether another round follows: a pure function of the history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.config.closing import carries
from coordinator.config.settings import CoordinatorSettings
from coordinator.steps.global_loss import Renewed, Told, global_losses, until_known, without_each
from facility.exchange.text import number_of


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether another round follows, and why."""

    proceed: bool
    reason: str
    """`go on`, or why not."""
    broken: bool = False
    """True when operator action is needed: the loss diverged."""


def decide(
    settings: CoordinatorSettings,
    losses: Sequence[float | None],
    without: Sequence[Sequence[float | None]] = (),
    *,
    done: int | None = None,
) -> Decision:
    """Decide after round `len(losses) - 1`, or after `done` rounds of which the newest losses are not known yet.

    `losses[r]`: global validation loss (nats per token) of the model that round r received; None if no facility
    reported one. `without`: the same with one facility left out, for each. An early end requires that each of them
    agrees: a single facility's report never ends a federation of several.
    """
    found = _early_end(settings, losses)
    if found is not None:
        others = [_early_end(settings, other) for other in without]
        if all(other is not None and other.broken == found.broken for other in others):
            return found
    if (len(losses) if done is None else done) >= settings.rounds:
        return Decision(proceed=False, reason=all_done(settings.rounds))
    return Decision(proceed=True, reason="go on")


def all_done(rounds: int) -> str:
    """Why a federation of so many rounds ends after its last."""
    return f"all {rounds:,} rounds are done" if rounds > 1 else "the only round is done"


def decide_after(settings: CoordinatorSettings, reported: Sequence[Told], renewed: Renewed = ()) -> Decision:
    """Decide after the last of the rounds whose losses were `reported` (and are plausible)."""
    late, losses = carries(settings.closing), global_losses(reported, renewed)
    known = until_known(losses) if late else losses
    return decide(settings, known, without_each(reported, renewed, latest=late), done=len(losses))


def _early_end(settings: CoordinatorSettings, losses: Sequence[float | None]) -> Decision | None:
    """Divergence, target or patience; None: nothing ends the federation early."""
    stop = settings.stop
    current = losses[-1]
    if current is not None and not math.isfinite(current):
        return Decision(proceed=False, reason=f"the global loss is {current}", broken=True)
    known = [(number, loss) for number, loss in enumerate(losses) if loss is not None and math.isfinite(loss)]
    best_round, best = min(known, key=lambda pair: (pair[1], pair[0])) if known else (0, math.inf)
    if current is not None and stop.divergence and current > best + stop.divergence:
        reason = (
            f"the global loss {current:.4f} is more than {stop.divergence} above the best "
            f"({best:.4f}, received by round {best_round})"
        )
        return Decision(proceed=False, reason=reason, broken=True)
    if current is not None and stop.target_perplexity and current <= math.log(stop.target_perplexity):
        reached = f"the global perplexity {math.exp(current):.3f} reached the target {stop.target_perplexity}"
        return Decision(proceed=False, reason=reached)
    if stop.patience and known and len(losses) - 1 - best_round >= stop.patience:
        lasted = number_of(stop.patience, "round")
        reason = f"no better global loss for {lasted} (best {best:.4f}, received by round {best_round})"
        return Decision(proceed=False, reason=reason)
    return None
