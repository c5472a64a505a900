"""How much noise the rest of a federation needs, so that everything together stays within the stated budget.

Without a crash the noise is the same in every step, and the last step ends at the stated epsilon. Steps that were lost
and made again are paid for by slightly more noise in those to come. Where that would be more than `MOST_RAISE` times
the noise that the plan needs, the facility is out of its budget and takes no further step.

Where the plan needs less noise than before, as with a larger epsilon or fewer rounds, the releases to come get what is
left of the whole budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from facility.exchange.errors import InputError
from facility.exchange.messages.privacy import DifferentialSettings
from facility.exchange.privacy.accounting import Releases, epsilon_of, least_noise

MOST_RAISE = 4.0
LESS = 0.98
"""Share of the last noise that must be enough for the whole plan, and for what is left of it, before noise falls."""


class OutOfBudget(InputError):
    """The stated privacy budget is spent: this facility releases nothing more."""


def choose_noise(
    settings: DifferentialSettings,
    before: Sequence[Releases],
    *,
    planned: int,
    left: int,
    sampling_rate: float,
    what: str,
) -> float:
    """The noise multiplier of the `left` releases to come, of `planned` in all. Raises `OutOfBudget`.

    `what`: the releases, for the message.
    """
    epsilon, delta = settings.epsilon, settings.delta
    if before:
        last = before[-1].noise_multiplier
        coming = Releases(count=left, noise_multiplier=last, sampling_rate=sampling_rate)
        fits = before[-1].sampling_rate == sampling_rate and epsilon_of(joined(before, coming), delta) <= epsilon
        less = replace(coming, noise_multiplier=LESS * last)
        enough = ([replace(less, count=planned)], [*before, less])
        if fits and not all(epsilon_of(releases, delta) <= epsilon for releases in enough):
            return last
    plan = least_noise(count=planned, sampling_rate=sampling_rate, epsilon=epsilon, delta=delta)
    needed = plan
    if before:
        needed = least_noise(count=left, sampling_rate=sampling_rate, epsilon=epsilon, delta=delta, before=before)
    if needed is None or plan is None or needed > MOST_RAISE * plan:
        spent = epsilon_of(before, settings.delta)
        raise OutOfBudget(
            f"out of its privacy budget: {sum(one.count for one in before)} {what} have spent epsilon {spent:.3g} of "
            f"{settings.epsilon:g} (delta {settings.delta:g}), and {left} more do not fit; this facility takes no "
            "further part unless its owner allows a larger epsilon"
        )
    return needed


def joined(before: Sequence[Releases], coming: Releases) -> list[Releases]:
    """All releases, with `coming` counted to the last ones where it is of their kind."""
    *earlier, last = before
    if (last.noise_multiplier, last.sampling_rate) != (coming.noise_multiplier, coming.sampling_rate):
        return [*before, coming]
    return [
        *earlier,
        Releases(
            count=last.count + coming.count,
            noise_multiplier=last.noise_multiplier,
            sampling_rate=last.sampling_rate,
        ),
    ]
