"""The global model's validation loss per round, robust to any single facility.

Each facility evaluates the model it receives on its own data. While the same facilities report, the global loss is the
mean over them. Where one joins or is missing, levels cannot be compared: from there on the loss advances by the mean
*change* of the facilities that reported in both rounds, and stays where there are none, so that a change of
participants never looks like learning or divergence; nor does one of the data that a facility evaluates on. A facility
whose loss is implausible compared with the others' is left out of that round.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from coordinator.archive.rounds import FacilityRow, LaterLoss, RoundFile

MOST_CHANGE = 3.0
"""Nats per token that one facility's change may differ from the others' in a round: a factor of 20 in perplexity."""
MOST_LEVEL = 10.0
"""Nats per token that the first figure of a facility may differ from the others': a factor of 22,000."""

Told = Mapping[str, float]
"""Loss of the received model by facility, in one round."""
Renewed = Sequence[Collection[str]]
"""By round, the facilities that evaluate on other data from it on; `ALL` stands for every one."""
ALL = "*"
OF_DATA = re.compile(r"(?:facilities\[([^\]]+)\]\.)?(?:training\.evaluation_sequences|dataset): ")
"""What a change of validation data begins with (`coordinator.rounds.changes.Change`)."""


def plausible(reported: Sequence[Told]) -> list[dict[str, float]]:
    """Reported losses by round, without those that are implausible given the other facilities'.

    A change is measured against the facility's own last loss or its last plausible one, whichever is nearer. Of two
    facilities that disagree, the one that changed more is left out; of two newcomers, the one with the larger loss.
    """
    kept: list[dict[str, float]] = []
    last: dict[str, tuple[float, float]] = {}
    for current in reported:
        changes = {
            name: min((loss - before for before in last[name]), key=abs)
            for name, loss in current.items()
            if name in last
        }
        odd = _outliers(changes, MOST_CHANGE)
        sound = {name: loss for name, loss in current.items() if name not in odd}
        odd |= _outliers(sound, MOST_LEVEL) - set(changes)
        kept.append({name: loss for name, loss in current.items() if name not in odd})
        for name, loss in current.items():
            last[name] = (loss, loss if name not in odd or name not in last else last[name][1])
    return kept


def global_losses(reported: Sequence[Told], renewed: Renewed = ()) -> list[float | None]:
    """The global loss of each round, None where no facility reported one. `reported` is what `plausible` returned."""
    losses: list[float | None] = []
    alike = True
    for number, current in enumerate(reported):
        alike = alike and current.keys() == reported[0].keys() and not any(renewed[1 : number + 1])
        if not current:
            losses.append(None)
        elif alike:
            losses.append(_mean(list(current.values())))
        else:
            losses.append(_chained(reported[:number], losses, current, renewed))
    return losses


def without_each(
    reported: Sequence[Told], renewed: Renewed = (), *, latest: bool = False
) -> dict[str, list[float | None]]:
    """The global losses as they were without one facility, by each whose absence leaves another in the last round.

    `latest`: each up to its newest figure instead, as where most figures come late.
    """
    names = sorted({name for one in reported for name in one})
    others = ([{name: one[name] for name in one if name != out} for one in reported] for out in names)
    series = [global_losses(one, renewed) for one in others]
    series = [until_known(losses) for losses in series] if latest else series
    return {name: losses for name, losses in zip(names, series, strict=True) if losses[-1] is not None}


def until_known(losses: Sequence[float | None]) -> list[float | None]:
    """The losses up to the newest that is known; all of them where none is."""
    newest = max((number for number, loss in enumerate(losses) if loss is not None), default=len(losses) - 1)
    return list(losses[: newest + 1])


def losses_by_model(rounds: Sequence[Iterable[FacilityRow]]) -> list[dict[str, float]]:
    """What was reported of the model that each round received; a late update's figure is of an earlier round's."""
    return _by_model(rounds, losses_of_rows, lambda row: row.late_loss)


def deviations_by_model(rounds: Sequence[Iterable[FacilityRow]]) -> list[dict[str, float]]:
    """By facility, the standard deviation of the noise in each of `losses_by_model`, in nats; those without
    differential privacy are left out."""

    def of_rows(rows: Iterable[FacilityRow]) -> dict[str, float]:
        return {row.facility: found for row in rows if (found := deviation_of(row)) is not None}

    return _by_model(rounds, of_rows, deviation_of)


def deviation_of(row: FacilityRow) -> float | None:
    """Standard deviation of the noise in a row's validation losses, in nats; None without differential privacy."""
    return float(row.privacy["validation_deviation"]) if row.privacy else None


def _by_model(
    rounds: Sequence[Iterable[FacilityRow]],
    of_rows: Callable[[Iterable[FacilityRow]], dict[str, float]],
    of_late: Callable[[FacilityRow], float | None],
) -> list[dict[str, float]]:
    """Figures of each round's rows by facility; `of_late`: one that belongs to the round whose model was received."""
    rows = [list(one) for one in rounds]
    found = [of_rows(one) for one in rows]
    for number, one in enumerate(rows):
        for row in one:
            late = row.status == "ok" and row.late_loss is not None and 0 < row.staleness <= number
            if late and (figure := of_late(row)) is not None:
                found[number - row.staleness].setdefault(row.facility, figure)
    return found


def losses_known(history: Sequence[RoundFile]) -> list[float | None]:
    """The global loss of each round in `history`, including what late updates reported of its model since."""
    reported = plausible(losses_by_model([entry.facilities for entry in history]))
    return global_losses(reported, renewed_in(history))


def renewed_in(history: Sequence[RoundFile], *now: Iterable[str]) -> list[set[str]]:
    """Whose validation data are others from each round on, by what its file says that changed (`RoundFile.changes`).
    `now`: the same of a round that has no file yet."""
    changes = [*(entry.changes for entry in history), *now]
    return [{match[1] or ALL for one in told if (match := OF_DATA.match(one))} for told in changes]


def later_than(
    history: Sequence[RoundFile], losses: Sequence[float | None], reported: Sequence[Told]
) -> dict[str, LaterLoss]:
    """Losses of the rounds in `history` that are now known otherwise than their files say."""
    before = {entry.round: entry.global_loss for entry in history}
    for entry in history:
        before |= {int(number): one.loss for number, one in entry.later_losses.items()}
    return {
        str(number): LaterLoss(loss=loss, over=sorted(reported[number]))
        for number, was in before.items()
        if (loss := losses[number]) is not None and loss != was
    }


def losses_of(entry: RoundFile) -> dict[str, float]:
    """What the facilities that took part in an archived round reported of the model that it received."""
    return losses_of_rows(entry.facilities)


def losses_of_rows(rows: Iterable[FacilityRow]) -> dict[str, float]:
    """Losses of the received model by facility; rows of older archives hold perplexities only."""
    losses = {}
    for row in rows:
        if row.status == "ok" and row.loss_received is not None:
            losses[row.facility] = row.loss_received
        elif row.status == "ok" and row.perplexity_received is not None and row.perplexity_received >= 1.0:
            losses[row.facility] = math.log(row.perplexity_received)
    return losses


def _chained(reported: Sequence[Told], losses: Sequence[float | None], current: Told, renewed: Renewed) -> float:
    """The loss of the latest earlier round with a facility in common, and the mean change since of those in common.

    Where no earlier round has any, nothing is known of a change: the loss is that of the latest round.
    """
    for number in reversed(range(len(reported))):
        since = renewed[number + 1 : len(reported) + 1]
        others = {name for one in since for name in (current if ALL in one else one)}
        common = [name for name in current if name in reported[number] and name not in others]
        before = losses[number]
        if common and before is not None:
            return before + _mean([current[name] - reported[number][name] for name in common])
    latest = next((loss for loss in reversed(losses) if loss is not None), None)
    return _mean(list(current.values())) if latest is None else latest


def _outliers(values: Mapping[str, float], most: float) -> set[str]:
    """Names whose value is further than `most` from the median; of two values, from the smaller one in size."""
    if len(values) < 2:
        return set()
    centre = min(values.values(), key=abs) if len(values) == 2 else statistics.median_low(values.values())
    return {name for name, value in values.items() if not abs(value - centre) <= most}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
