"""What has changed in federation.yml while a federation lives, and what follows from it for the rounds to come.

A pure function of two descriptions (`coordinator.config.described`). A change that makes later models differ must be
accepted (`crossfed run --accept`); every change is written into the file of the round that is the first under it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FROM_NOW = "holds from the next round on"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One key, or one facility."""

    key: str
    """As in federation.yml; with the facility's name in brackets where others have another value."""
    before: Any
    """None: it was not there."""
    now: Any
    follows: str
    affects: bool
    """Whether the models of later rounds differ for it."""

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.now)}; {self.follows}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What follows from a change of keys that match."""

    pattern: str
    affects: bool
    follows: str


SAME_RESULTS = "results do not change"
STRETCHED = (
    "the learning rate's schedule spans all steps of all rounds: it is stretched, and goes on at the share that is done"
)
KEPT = f"{FROM_NOW}; the optimizers' state is kept"
RULES = (
    Rule(pattern=r"training\.(steps|batch_sequences)", affects=True, follows=f"{STRETCHED}; {KEPT}"),
    Rule(
        pattern=r"training\.(optimizer|optimizer_parameters.*)", affects=True, follows="optimizers begin with new state"
    ),
    Rule(pattern=r"training\.(keep_optimizer|optimizer_state)", affects=True, follows=FROM_NOW),
    Rule(
        pattern=r"training\.drift_correction",
        affects=True,
        follows="steps are corrected from the second round on that facilities train with it; switched off, at once",
    ),
    Rule(
        pattern=r"training\.(learning_rate|minimum_learning_rate_ratio|schedule|warmup_steps)",
        affects=True,
        follows=f"the schedule goes on at the share that is done; {KEPT}",
    ),
    Rule(pattern=r"training\.(weight_decay|beta1|beta2|epsilon|clip_norm|proximal)", affects=True, follows=KEPT),
    Rule(
        pattern=r"training\.lora\..*",
        affects=True,
        follows="adapters of another form: optimizers begin with new state, and late updates no longer fit",
    ),
    Rule(
        pattern=r"training\.evaluation_sequences",
        affects=True,
        follows="losses are of other validation data than before: perplexities cannot be compared across this round",
    ),
    Rule(
        pattern=r"training\.(ranks|threads|device|peak_flops|stall_seconds|tracker|trace|signing_key|limits\..*|layout\..*)",
        affects=False,
        follows="results do not change but for rounding",
    ),
    Rule(pattern=r"dataset", affects=True, follows="it trains on other data from the next round on"),
    Rule(pattern=r"deployment\..*", affects=False, follows=f"its jobs are started in another way; {SAME_RESULTS}"),
    Rule(
        pattern=r"aggregation\.(server_optimizer|server_.*)",
        affects=True,
        follows="the server optimizer keeps the tensors that it has under the same name; others begin at zero",
    ),
    Rule(pattern=r"aggregation\.allowed_signers|signing_key", affects=False, follows=FROM_NOW),
    Rule(pattern=r"aggregation\..*", affects=True, follows=f"{FROM_NOW}; models made so far stay as they are"),
    Rule(pattern=r"stop\..*|limits\..*|final_evaluation", affects=False, follows="decides when the federation ends"),
    Rule(
        pattern=r"minimum_facilities|retries|come_backs|keep_rounds|carbon_g_per_kwh|trackers|progress_seconds|license"
        r"|creators|funding|base_model|pretrained|submit_ahead.*|evaluation\..*|sending\.(signing_key|valid_hours)",
        affects=False,
        follows=SAME_RESULTS,
    ),
    Rule(pattern=r"seed", affects=True, follows="the facilities draw their data in another order"),
    Rule(pattern=r"model", affects=False, follows="the archive goes on from its own newest model"),
    Rule(pattern=r".*", affects=True, follows=FROM_NOW),
)
"""The first that matches holds; what no rule knows affects results."""


def changes_of(before: Mapping[str, Any], now: Mapping[str, Any], *, done: int) -> list[Change]:
    """Everything that differs. `done`: complete rounds, so that round `done` is the first under the changes."""
    old, new = before.get("facilities", {}), now["facilities"]
    found = [_joins(name, done) for name in new if name not in old]
    found += [_leaves(name, done) for name in old if name not in new]
    found += [
        _rounds(change, new, done) if change.key == "rounds" else change
        for change in _differing(before.get("federation", {}), now["federation"])
    ]
    own = {name: list(_differing(old[name], new[name])) for name in new if name in old}
    return found + list(_common(own))


def _common(own: Mapping[str, Sequence[Change]]) -> Iterator[Change]:
    """One change where all facilities share it, else one for each of them."""
    told: set[Any] = set()
    for name, changes in own.items():
        for change in changes:
            sharing = [other for other, theirs in own.items() if change in theirs]
            if len(sharing) < len(own) or (len(own) == 1 and not change.key.startswith("training.")):
                yield _renamed(change, f"facilities[{name}].{change.key}")
            elif change.key not in told:
                told.add(change.key)
                yield change


def _renamed(change: Change, key: str) -> Change:
    return Change(key=key, before=change.before, now=change.now, follows=change.follows, affects=change.affects)


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if old != new:
            rule = next(rule for rule in RULES if re.fullmatch(rule.pattern, key))
            yield Change(key=key, before=old, now=new, follows=rule.follows, affects=rule.affects)


def _rounds(change: Change, facilities: Mapping[str, Mapping[str, Any]], done: int) -> Change:
    """More or fewer rounds: with a schedule that is not constant, the learning rates of the rounds to come change."""
    shapes = {str(one.get("training.schedule")) for one in facilities.values()}
    if change.now <= done:
        follows, affects = f"{done} rounds are complete: none follows", False
    elif shapes == {"constant"}:
        follows, affects = "the learning rate is constant: only the number of rounds changes", False
    else:
        follows, affects = f"{STRETCHED} ({', '.join(sorted(shapes))})", True
    return Change(key=change.key, before=change.before, now=change.now, follows=follows, affects=affects)


def _joins(name: str, done: int) -> Change:
    follows = (
        f"it begins with round {done} from the newest model, at the others' place in the schedule, with a new "
        "optimizer of its own; its weight is that of what it trains on"
    )
    return Change(key=f"facilities[{name}]", before=None, now="joins", follows=follows, affects=True)


def _leaves(name: str, done: int) -> Change:
    follows = (
        f"from round {done} on it is asked for nothing, and the others' weights grow; its rounds stay in the history"
    )
    return Change(key=f"facilities[{name}]", before="takes part", now=None, follows=follows, affects=True)


def _shown(value: Any) -> str:
    return "(none)" if value is None or value == "" else str(value)[:200]
