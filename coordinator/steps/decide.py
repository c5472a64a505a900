"""Whether another round follows: a pure function of the history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.config.closing import carries_late
from coordinator.config.settings import CoordinatorSettings
from coordinator.steps.global_loss import Renewed, Told, global_losses, until_known, without_each
from coordinator.steps.guard import DEVIATIONS, noise_of
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
    noise: Sequence[Sequence[float]] = (),
) -> Decision:
    """Decide after round `len(losses) - 1`, or after `done` rounds of which the newest losses are not known yet.

    `losses[r]`: global validation loss (nats per token) of the model that round r received; None if no facility
    reported one. `without`: the same with one facility left out, for each. An early end requires that each of them
    agrees: a single facility's report never ends a federation of several. `noise`: of each of these series, of `losses`
    first, the standard deviations of the noise in its losses (differential privacy); none by default.
    """
    every = [losses, *without]
    noises = noise or [()] * len(every)
    found = _early_end(settings, losses, noises[0])
    if found is not None:
        others = [_early_end(settings, other, own) for other, own in zip(without, noises[1:], strict=True)]
        if all(other is not None and other.broken == found.broken for other in others):
            return found
    if (len(losses) if done is None else done) >= settings.rounds:
        return Decision(proceed=False, reason=all_done(settings.rounds))
    return Decision(proceed=True, reason="go on")


def all_done(rounds: int) -> str:
    """Why a federation of so many rounds ends after its last."""
    return f"all {rounds:,} rounds are done" if rounds > 1 else "the only round is done"


def decide_after(
    settings: CoordinatorSettings,
    reported: Sequence[Told],
    renewed: Renewed = (),
    deviations: Sequence[Told] = (),
) -> Decision:
    """Decide after the last of the rounds whose losses were `reported` (and are plausible).

    `deviations`: what each facility says of the noise in its own, by round. It counts where the settings ask for noise.
    """
    late, losses = carries_late(settings.closing), global_losses(reported, renewed)
    known = until_known(losses) if late else losses
    without = without_each(reported, renewed, latest=late)
    noise: list[list[float]] = []
    if deviations and settings.privacy is not None and settings.privacy.differential is not None:
        left = [[{name: one[name] for name in one if name != out} for one in reported] for out in ("", *without)]
        noise = [noise_of(rows, deviations) for rows in left]
    return decide(settings, known, list(without.values()), done=len(losses), noise=noise)


def _early_end(
    settings: CoordinatorSettings, losses: Sequence[float | None], noise: Sequence[float]
) -> Decision | None:
    """Divergence, target or patience; None: nothing ends the federation early. What noise explains ends nothing."""
    stop = settings.stop
    current, own = losses[-1], _noise_in(noise, len(losses) - 1)
    if current is not None and not math.isfinite(current):
        return Decision(proceed=False, reason=f"the global loss is {current}", broken=True)
    known = [(number, loss) for number, loss in enumerate(losses) if loss is not None and math.isfinite(loss)]
    best_round, best = min(known, key=lambda pair: (pair[1], pair[0])) if known else (0, math.inf)
    explained = DEVIATIONS * math.hypot(own, _noise_in(noise, best_round))
    if current is not None and stop.divergence and current > best + stop.divergence + explained:
        reason = (
            f"the global loss {current:.4f} is more than {stop.divergence} above the best "
            f"({best:.4f}, received by round {best_round})"
        )
        return Decision(proceed=False, reason=reason, broken=True)
    sure = current + DEVIATIONS * own if current is not None else math.inf
    if current is not None and stop.target_perplexity and sure <= math.log(stop.target_perplexity):
        reached = f"the global perplexity {math.exp(current):.3f} reached the target {stop.target_perplexity}"
        return Decision(proceed=False, reason=reached)
    lasts = known and len(losses) - 1 - best_round >= stop.patience
    if stop.patience and lasts and _no_better(known, best_round, noise):
        lasted = number_of(stop.patience, "round")
        reason = f"no better global loss for {lasted} (best {best:.4f}, received by round {best_round})"
        return Decision(proceed=False, reason=reason)
    return None


def _no_better(known: Sequence[tuple[int, float]], best_round: int, noise: Sequence[float]) -> bool:
    """Are the losses after the best one, by their mean, above it by more than noise explains?

    The least of many noised losses is as low as its noise made it, so a model that is still improving by less than the
    noise in a figure beats it late or never.
    """
    after = [(number, loss) for number, loss in known if number > best_round]
    if not any(noise) or not after:
        return True
    mean = math.fsum(loss for _, loss in after) / len(after)
    of_mean = math.hypot(*(_noise_in(noise, number) for number, _ in after)) / len(after)
    best = dict(known)[best_round]
    return mean - best > DEVIATIONS * math.hypot(_noise_in(noise, best_round), of_mean)


def _noise_in(noise: Sequence[float], number: int) -> float:
    """Standard deviation of the noise in a round's loss; 0 where none is known."""
    return noise[number] if number < len(noise) else 0.0
