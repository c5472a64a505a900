"""What has changed in federation.yml while a federation lives, and what follows from it for the rounds to come.

A pure function of two descriptions (`coordinator.config.described`). A change that makes later models differ must be
accepted (`crossfed run --accept`); every change is written into the file of the round that is the first under it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.config.described import DIGESTS, default_of

RANK = "training.lora.rank"
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
    possible: bool = True
    """False: no round can go on from what the archive holds."""

    def __str__(self) -> str:
        return f"{self.key}: {_shown(self.before)} -> {_shown(self.now)}; {self.follows}"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What follows from a change of keys that match."""

    pattern: str
    affects: bool
    follows: str
    of_adapters: bool = False
    """Whether adapters that were made before cannot be trained under it."""


SAME_RESULTS = "results do not change"
IN_ROUNDS = re.compile(r"^(closing\.|limits\.|even\.|(?=longest_queue_hours$))")
"""Keys that stand under `rounds` in federation.yml."""
CLOSING = "closing."
LATER = "rounds close without facilities that are late, whose updates are averaged in a later round"
NEVER = "rounds close without facilities that are late, whose updates are discarded"
WAITING = (
    "rounds wait for all again; an update that is late at the change is discarded, and its facility begins with the "
    "newest model"
)
STRETCHED = (
    "the learning rate's schedule spans all steps of all rounds: it is stretched, and goes on at the share that is done"
)
KEPT = f"{FROM_NOW}; the optimizers' state is kept"
RULES = (
    Rule(pattern=r"training\.(steps|batch_sequences)", affects=True, follows=f"{STRETCHED}; {KEPT}"),
    Rule(pattern=r"training\.optimizer", affects=True, follows="optimizers begin with new state"),
    Rule(
        pattern=r"training\.optimizer_parameters.*",
        affects=True,
        follows=f"{KEPT}, or begins anew where it has another form",
    ),
    Rule(
        pattern=r"training\.freeze",
        affects=True,
        follows=f"{KEPT}, or begins anew where more is trained than before",
    ),
    Rule(
        pattern=r"training\.(keep_optimizer|optimizer_state|optimizer_state_form|optimizer_state_every|first_moments)",
        affects=True,
        follows=FROM_NOW,
    ),
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
        pattern=r"training\.lora\.(rank|targets|parameters|modules_to_save|dora)",
        affects=True,
        follows="no round can go on from adapters of another form, which those that are complete made: undo it, or "
        "begin another federation, from base and adapters as one model (`python -m coordinator.model` with --merged)",
        of_adapters=True,
    ),
    Rule(
        pattern=r"training\.lora\.(alpha|rslora)",
        affects=True,
        follows="adapters that are complete are scaled anew as well: the next round begins with another model than the "
        "last one made",
    ),
    Rule(pattern=r"training\.lora\..*", affects=True, follows=KEPT),
    Rule(
        pattern=r"training\.evaluation_sequences",
        affects=True,
        follows="losses are of other validation data than before: the global loss goes on from where it was",
    ),
    Rule(
        pattern=r"training\.(ranks|threads|device|peak_flops|stall_seconds|tracker|trace|signing_key|limits\..*|layout\..*)",
        affects=False,
        follows="results do not change but for rounding",
    ),
    Rule(
        pattern=r"training\.(encoding|sparse_density|unsent_share)",
        affects=True,
        follows="updates are sent in another way from the next round on; what was left unsent is sent with them",
    ),
    Rule(pattern=r"dataset", affects=True, follows="it trains on other data from the next round on"),
    Rule(
        pattern=r"deployment\.access",
        affects=False,
        follows=f"hosts, accounts or keys, which stand in federation.yml alone; {SAME_RESULTS}",
    ),
    Rule(
        pattern=r"deployment\.job_script",
        affects=False,
        follows=f"the filled template: its jobs are started in another way; {SAME_RESULTS}",
    ),
    Rule(pattern=r"deployment\..*", affects=False, follows=f"its jobs are started in another way; {SAME_RESULTS}"),
    Rule(
        pattern=r"trainer\.module",
        affects=True,
        follows="another program trains from the next round on; optimizers begin with new state",
    ),
    Rule(
        pattern=r"privacy\.differential(\..*)?",
        affects=True,
        follows="noise holds from the next round on; steps that were noised before count against the budget, and no "
        "budget covers rounds without noise",
    ),
    Rule(pattern=r"peer_signers|privacy\.peer_signers", affects=False, follows=FROM_NOW),
    Rule(pattern=r"workdir", affects=False, follows="jobs that are late or still run are looked for there alone"),
    Rule(
        pattern=r"closing\.(quorum|grace|away)",
        affects=True,
        follows="rounds close at another time from the next one on; updates that are late are still averaged once",
    ),
    Rule(
        pattern=r"even(\..*)?",
        affects=True,
        follows="from the next round on facilities take other numbers of steps, over the same part of the schedule",
    ),
    Rule(
        pattern=r"closing\.late",
        affects=True,
        follows="holds for the next round, and for updates that are late at the change",
    ),
    Rule(
        pattern=r"aggregation\.(server_optimizer|server_.*)",
        affects=True,
        follows="the server optimizer keeps the tensors that mean the same to it as to the one before; others begin "
        "anew",
    ),
    Rule(pattern=r"aggregation\.allowed_signers|signing_key", affects=False, follows=FROM_NOW),
    Rule(pattern=r"aggregation\..*", affects=True, follows=f"{FROM_NOW}; models made so far stay as they are"),
    Rule(
        pattern=r"longest_queue_hours",
        affects=False,
        follows="decides after which wait in its queue a job is cancelled",
    ),
    Rule(pattern=r"stop\..*|limits\..*|final_evaluation", affects=False, follows="decides when the federation ends"),
    Rule(
        pattern=r"minimum_facilities|retries|come_backs|keep_rounds|carbon_g_per_kwh|trackers|progress_seconds|license"
        r"|creators|funding|title|base_model|pretrained|submit_ahead.*|public\..*|notify|evaluation\..*"
        r"|sending\.(signing_key|valid_hours)",
        affects=False,
        follows=SAME_RESULTS,
    ),
    Rule(
        pattern=r"seed",
        affects=True,
        follows="the facilities draw their data in another order; optimizers begin with new state",
    ),
    Rule(pattern=r"model", affects=False, follows="the archive goes on from its own newest model"),
    Rule(pattern=r".*", affects=True, follows=FROM_NOW),
)
"""The first that matches holds; what no rule knows affects results."""


def changes_of(before: Mapping[str, Any], now: Mapping[str, Any], *, done: int) -> list[Change]:
    """Everything that differs. `done`: complete rounds, so that round `done` is the first under the changes."""
    old, new = before.get("facilities", {}), now["facilities"]
    found = [_joins(name, done) for name in new if name not in old]
    found += [_leaves(name, done) for name in old if name not in new]
    own = _closing(before.get("federation", {}), now["federation"])
    found += [_rounds(change, new, done) if change.key == "rounds" else _placed(change) for change in own]
    theirs = {name: list(_differing(old[name], new[name])) for name in new if name in old}
    return found + list(_common(theirs))


def _closing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    """Changes of the federation's own keys; from rounds that wait to rounds that do not, and back, is one."""
    found = list(_differing(before, now))
    old, new = ({key: one for key, one in data.items() if key.startswith(CLOSING)} for data in (before, now))
    if bool(old) == bool(new):
        return found
    drops = new.get("closing.late") == "drop"
    change = Change(
        key="rounds.quorum",
        before=_at_once(old),
        now=_at_once(new),
        follows=f"{NEVER if drops else LATER}, from the next one on" if new else WAITING,
        affects=True,
    )
    return [change, *(one for one in found if not one.key.startswith(CLOSING))]


def _at_once(closing: Mapping[str, Any]) -> str:
    """`2 (grace 0, late carry)`."""
    if not closing:
        return "all"
    values = {key.removeprefix(CLOSING): value for key, value in closing.items()}
    others = ", ".join(f"{name} {values[name]}" for name in ("grace", "late") if name in values)
    return f"{values.get('quorum', 'all')} ({others})"


def _placed(change: Change) -> Change:
    """Under its key of federation.yml."""
    return replace(change, key=IN_ROUNDS.sub("rounds.", change.key))


def _common(own: Mapping[str, Sequence[Change]]) -> Iterator[Change]:
    """One change where all facilities share it, else one for each of them."""
    listed: set[Any] = set()
    for name, changes in own.items():
        for change in changes:
            sharing = [other for other, theirs in own.items() if change in theirs]
            if len(sharing) < len(own) or (len(own) == 1 and not change.key.startswith("training.")):
                yield replace(change, key=f"facilities[{name}].{change.key}")
            elif change.key not in listed:
                listed.add(change.key)
                yield change


def _differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        # of an archive of an earlier version, which did not hold the key
        unknown = key not in before and (key in (*DIGESTS, "workdir") or new in ("", [], {}) or _new(key, new, before))
        if old != new and not unknown and not (_only_opened(key, old, now) or _only_opened(key, new, before)):
            rule = next(rule for rule in RULES if re.fullmatch(rule.pattern, key))
            possible = not (rule.of_adapters and before.get(RANK))
            follows = FROM_NOW if possible and rule.of_adapters else rule.follows
            yield Change(key=key, before=old, now=new, follows=follows, affects=rule.affects, possible=possible)


def _only_opened(key: str, value: Any, other: Mapping[str, Any]) -> bool:
    """Whether an empty mapping has keys on the `other` side, of which each is a change of its own."""
    return value == {} and any(one.startswith(f"{key}.") for one in other)


def _new(key: str, value: Any, before: Mapping[str, Any]) -> bool:
    """Whether an earlier version may not have known this setting, which has its default: nobody has changed it.

    A section that was off is in `before` as None. What a facility has beside `training` is described where it is not
    the default.
    """
    parts = key.split(".")
    if any(".".join(parts[:end]) in before for end in range(1, len(parts))):
        return False
    return ("dataset" not in before or parts[0] == "training") and default_of(key) == value


def _rounds(change: Change, facilities: Mapping[str, Mapping[str, Any]], done: int) -> Change:
    """More or fewer rounds: with a schedule that is not constant, the learning rates of the rounds to come change."""
    shapes = {str(one.get("training.schedule")) for one in facilities.values()}
    if change.now <= done:
        follows, affects = f"complete rounds: {done}; none follows", False
    elif shapes == {"constant"}:
        follows, affects = "the learning rate is constant: only the number of rounds changes", False
    else:
        follows, affects = f"{STRETCHED} ({', '.join(sorted(shapes))})", True
    return replace(change, follows=follows, affects=affects)


def _joins(name: str, done: int) -> Change:
    follows = (
        f"it begins with round {done} from the newest model, at the others' place in the schedule, with a new "
        "optimizer of its own (one that comes back: with the state that it kept); its weight is that of what it trains "
        "on"
    )
    return Change(key=f"facilities[{name}]", before=None, now="joins", follows=follows, affects=True)


def _leaves(name: str, done: int) -> Change:
    follows = (
        f"from round {done} on it is asked for nothing, and the others' weights grow; its rounds stay in the history, "
        "and a job of it that is left in its queue is cancelled"
    )
    return Change(key=f"facilities[{name}]", before="takes part", now=None, follows=follows, affects=True)


def _shown(value: Any) -> str:
    return "(none)" if value is None or value == "" else str(value)[:200]
