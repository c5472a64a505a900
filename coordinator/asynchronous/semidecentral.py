"""Semi-decentralised rounds over facilities: groups average as updates arrive, without waiting for the slowest.

    python -m coordinator.asynchronous.semidecentral --state DIR start --member it --member cs --member de --window 300
    python -m coordinator.asynchronous.semidecentral --state DIR ready it --update DIR
    python -m coordinator.asynchronous.semidecentral --state DIR tick | leave de | join de | finish it

The same pure scheduler that groups replicas inside a facility (`facility.exchange.scheduling.groups`): "ready" is that
a facility's update has arrived, "reduce" is the weighted mean of the group's files, which becomes the next model of
every member. Nothing stays alive between calls: the state is a directory, written after the models it names, so a call
that was killed is simply made again. `finish` of every member gives the final mean over all.

A facility's update here is a whole checkpoint (not a difference), since members of a group started from different
models. `coordinator.asynchronous` makes a federation's workflow of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from coordinator.aggregate import aggregate
from coordinator.aggregation.settings import AggregationSettings, ScreenSettings
from coordinator.asynchronous.figures import figures_of
from facility.exchange.checkpoints.checkpoint import open_checkpoint
from facility.exchange.errors import ConfigurationError, InputError, UpdateRefused, exit_on_error
from facility.exchange.files.durable import write_json
from facility.exchange.logs import add_log_options
from facility.exchange.messages.manifest import (
    NAME,
    Manifest,
    read_manifest,
    run_of,
    verify_manifest,
    with_run,
    write_manifest,
)
from facility.exchange.messages.report import REPORT, read_report
from facility.exchange.scheduling.groups import Group, GroupRules, GroupScheduler

STATE = "state.json"
FORMAT = 2


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """A group that has been carried out."""

    group: Group
    model: Path
    """The mean: next model of every member."""
    weights: dict[str, float]
    """What each member's update counted; they sum to 1."""

    def __str__(self) -> str:
        members = ", ".join(f"{member} {weight:.3f}" for member, weight in self.weights.items())
        return f"group {self.group.number} ({self.group.reason}): {members} -> {self.model}"


class SemiDecentralised:
    """The scheduler driven by arriving files."""

    def __init__(
        self, state: Path, *, aggregation: AggregationSettings | None = None, base: Path | None = None
    ) -> None:
        """`aggregation`: which tensors take part and in which dtype they are written; rule and weights are ignored.

        `base`: the model whose other tensors and files every mean copies; None: those of the group's first update.
        Raises `InputError` without a state, `ConfigurationError` for a state of another command.
        """
        self.state = Path(state)
        self.aggregation, self.base = aggregation or AggregationSettings(rule="mean"), base
        try:
            raw = json.loads((self.state / STATE).read_text())
            if raw["format"] != FORMAT:
                raise ConfigurationError(
                    f"format {raw['format']}, expected {FORMAT}: begin again in another directory",
                    file=self.state / STATE,
                )
            self.scheduler = GroupScheduler.restore(raw["scheduler"])
            self.now = float(raw["scheduler"]["now"])
            """Time of the last event, Unix seconds: none may come before it."""
            self.weights: Literal["tokens", "equal"] = raw["weights"]
            self.updates: dict[str, str] = raw["updates"]
            self.models: dict[str, str] = raw["models"]
            """By facility, the model that it goes on from."""
            self.gone: dict[str, int] = raw["gone"]
            """Rounds of those that left, for when they come back."""
            self.rounds: dict[str, int] = raw["rounds"]
            """By facility, its updates that a group has averaged: the number of its next round."""
            self.final: str = raw["final"]
            """The mean over all, once all have finished; else empty."""
            self.failures: list[dict[str, Any]] = raw["failures"]
            self.groups: list[dict[str, Any]] = raw["groups"]
            """Every group carried out: members, what counted how much, why it was formed."""
            self.runs: int = raw["runs"]
            """How often the workflow was started on this state."""
        except FileNotFoundError:
            raise InputError(f"{self.state / STATE} is missing: begin with `start --member NAME ...`") from None
        except (KeyError, ValueError, TypeError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"is not a state of this command: {error!r}", file=self.state / STATE) from None

    @classmethod
    def start(
        cls,
        state: Path,
        members: Sequence[str],
        rules: GroupRules,
        *,
        weights: str = "tokens",
        model: Path | None = None,
    ) -> SemiDecentralised:
        """A new state; `model`: what every member begins with.

        Raises `InputError` where one is already, or for fewer than two members.
        """
        state = Path(state)
        if (state / STATE).exists():
            raise InputError(f"{state / STATE} exists already: choose another directory, or go on with `ready`")
        if len(set(members)) != len(members) or len(members) < 2:
            raise InputError(f"members are {list(members)}, expected two or more different names")
        if bad := [m for m in members if not m or "/" in m or m.startswith(".")]:
            raise InputError(f"member {bad[0]!r} cannot name a directory")
        state.mkdir(parents=True, exist_ok=True)
        models = {} if model is None else {member: str(Path(model).resolve()) for member in members}
        write_json(
            state / STATE,
            {
                "format": FORMAT,
                "scheduler": GroupScheduler(members, rules).snapshot(),
                "weights": weights,
                "updates": {},
                "models": models,
                "gone": {},
                "rounds": dict.fromkeys(members, 0),
                "final": "",
                "failures": [],
                "groups": [],
                "runs": 0,
            },
        )
        return cls(state)

    def save(self) -> None:
        """Write the state, whole: after the models that it names."""
        write_json(
            self.state / STATE,
            {
                "format": FORMAT,
                "scheduler": self.scheduler.snapshot(),
                "weights": self.weights,
                "updates": self.updates,
                "models": self.models,
                "gone": self.gone,
                "rounds": self.rounds,
                "final": self.final,
                "failures": self.failures,
                "groups": self.groups,
                "runs": self.runs,
            },
        )

    def ready(self, facility: str, update: Path, now: float) -> list[Reduced]:
        """An update has arrived and been verified."""
        self._check(facility, update)
        if facility in self.scheduler.waiting:
            raise InputError(f"facility {facility!r} has announced an update already; it waits for its group")
        self.updates[facility] = str(Path(update).resolve())
        return self._carry_out(self.scheduler.ready(facility, now))

    def finish(self, facility: str, now: float) -> list[Reduced]:
        """The facility sends no more updates; its last one takes part in the final mean over all."""
        if facility not in self.scheduler.members:
            raise InputError(f"{facility!r} is not a member; members are {', '.join(map(str, self.scheduler.members))}")
        if facility in self.scheduler.waiting:
            raise InputError(f"facility {facility!r} waits for its group; `tick`, then finish")
        if facility not in self.updates:
            raise InputError(f"facility {facility!r} has sent no update: let it `leave` instead")
        return self._carry_out(self.scheduler.finish(facility, now))

    def tick(self, now: float) -> list[Reduced]:
        """Close groups whose window has passed."""
        return self._carry_out(self.scheduler.tick(now))

    def leave(self, facility: str, now: float) -> list[Reduced]:
        """Nobody waits for this facility any longer."""
        if facility in self.scheduler.members:
            self.gone[facility] = self.scheduler.rounds(facility)
        return self._carry_out(self.scheduler.leave(facility, now))

    def join(self, facility: str, now: float, *, returning: bool = True) -> list[Reduced]:
        """A facility comes back, or a new one comes: it first receives, then contributes.

        `returning` is False for one that has received already: its next update counts.
        """
        if facility in self.scheduler.members:
            raise InputError(f"facility {facility!r} is a member already")
        rounds = self.gone.pop(facility, 0)
        self.rounds.setdefault(facility, rounds)
        return self._carry_out(self.scheduler.join(facility, now, returning=returning, rounds=rounds))

    # -- behind -----------------------------------------------------------------------------------------------------
    def _check(self, facility: str, update: Path) -> None:
        if facility not in self.scheduler.members:
            raise InputError(
                f"{facility!r} is not a member; members are {', '.join(map(str, self.scheduler.members))} (`join` adds "
                "one)"
            )
        manifest = verify_manifest(Path(update))
        if manifest.facility not in (None, facility):
            raise UpdateRefused(facility, f"{update} is of facility {manifest.facility!r}")
        if manifest.encoding != "full":
            raise UpdateRefused(facility, f"{update} is encoded as {manifest.encoding!r}, expected whole tensors")
        if self.weights == "tokens" and not read_report(Path(update)).tokens > 0:
            raise UpdateRefused(facility, "its report counts no tokens; start with --weights equal")

    def _carry_out(self, groups: list[Group]) -> list[Reduced]:
        reduced = []
        for group in groups:
            model, counted = self._reduce(group)
            for member, number in zip(group.members, group.rounds, strict=True):
                self.models[str(member)] = str(model)
                self.rounds[str(member)] = number
            if group.final:
                self.final = str(model)
            self.groups.append(self._told(group, model, counted))
            reduced.append(Reduced(group=group, model=model, weights=counted))
        self.save()
        return reduced

    def _told(self, group: Group, model: Path, counted: dict[str, float]) -> dict[str, Any]:
        """What the state keeps of a group."""
        reports = {}
        for member in map(str, group.members):
            if (Path(self.updates[member]) / REPORT).exists():
                reports[member] = read_report(Path(self.updates[member]))
        return {
            "number": group.number,
            "reason": group.reason,
            "final": group.final,
            "connected": group.connected,
            "members": [str(member) for member in group.members],
            "weights": counted,
            "rounds": {str(m): number for m, number in zip(group.members, group.rounds, strict=True)},
            "wait_seconds": {str(m): round(w, 3) for m, w in zip(group.members, group.waits, strict=True)},
            "reports": {member: figures_of(report) for member, report in reports.items()},
            "perplexity_returned": {member: report.perplexity_returned for member, report in reports.items()},
            "model": str(model),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _reduce(self, group: Group) -> tuple[Path, dict[str, float]]:
        """Weighted mean of the members' updates, as a model of its own, and what each counted (summing to 1)."""
        out = self.state / f"group-{group.number:06d}"
        weights: dict[str, float] = {}
        for member, weight in zip(group.members, group.weights, strict=True):
            tokens = read_report(Path(self.updates[str(member)])).tokens if self.weights == "tokens" else 1
            # The scheduler's weight undoes what many rounds would weigh; the tokens are this round's own.
            weights[str(member)] = weight * tokens
        directories = {m: Path(self.updates[m]) for m, w in weights.items() if w > 0}
        shutil.rmtree(out, ignore_errors=True)  # of a call that was killed before it wrote the state
        Path(f"{out}.round.json").unlink(missing_ok=True)
        first = directories[sorted(directories)[0]]
        with tempfile.TemporaryDirectory(dir=self.state, prefix=".base.", suffix=".tmp") as scratch:
            base = Path(scratch) / "base"
            base.mkdir()
            for path in (self.base or first).iterdir():
                if path.name not in (NAME, REPORT):
                    (base / path.name).symlink_to(path.resolve())
            aggregate(
                base=base,
                updates=list(directories.values()),
                out=out,
                settings=dataclasses.replace(
                    self.aggregation,
                    rule="mean",
                    weights={m: weights[m] for m in directories},
                    clip_ratio=0.0,  # the first update is the base: norms of the others say nothing
                    maximum_share=1.0,
                    screen=ScreenSettings(action="off"),
                ),
            )
        made = open_checkpoint(out)
        write_manifest(
            out,
            Manifest(
                kind="model",
                federation=read_manifest(first).federation,
                round=max(group.rounds),
                dtypes=made.dtypes(),
                parameters=made.parameters,
                extra={"group": group.number, "members": list(group.members), "final": group.final},
            ),
        )
        with_run(out, run_of(read_manifest(first)))
        total = sum(weights.values())
        return out, {member: weight / total for member, weight in weights.items()}


def describe(reduced: Sequence[Reduced], scheduler: GroupScheduler) -> dict[str, Any]:
    """What a call did, for the caller that sends models on."""
    return {
        "groups": [{"model": str(r.model), **dataclasses.asdict(r.group)} for r in reduced],
        "waiting": [str(m) for m in scheduler.waiting],
        "wake": scheduler.wake,
        "updates": scheduler.updates,
    }


def parser() -> argparse.ArgumentParser:
    assert __doc__
    p = argparse.ArgumentParser(
        prog="python -m coordinator.asynchronous.semidecentral", description=__doc__.split("\n\n")[0]
    )
    p.add_argument("--state", type=Path, required=True, metavar="DIR", help="where the state and group models are kept")
    p.add_argument("--now", type=float, metavar="SECONDS", help="time of the event (default: the clock, Unix seconds)")
    p.add_argument("--json", action="store_true", help="print the groups as JSON")
    commands = p.add_subparsers(dest="command", required=True)
    start = commands.add_parser("start", help="a new state")
    start.add_argument("--member", action="append", default=[], metavar="NAME", help="a facility; repeat")
    start.add_argument(
        "--bound", type=int, default=3, help="groups are connected at least once in this many rounds (default 3)"
    )
    start.add_argument("--minimum", type=int, default=2, help="members of a group at least (default 2)")
    start.add_argument("--maximum", type=int, default=0, help="members of a group at most (default 0: no limit)")
    start.add_argument("--window", type=float, default=300.0, help="seconds a first arrival waits (default 300)")
    start.add_argument("--no-debias", action="store_true", help="do not weigh by mean rounds / own rounds")
    start.add_argument("--weights", choices=["tokens", "equal"], default="tokens", help="(default tokens)")
    ready = commands.add_parser("ready", help="a facility's update has arrived")
    ready.add_argument("facility")
    ready.add_argument("--update", type=Path, required=True, metavar="DIR", help="the update, with its manifest")
    commands.add_parser("tick", help="close groups whose window has passed")
    for name, what in (
        ("leave", "the others no longer wait for it"),
        ("join", "it comes, or comes back"),
        ("finish", "it sends no more updates"),
    ):
        commands.add_parser(name, help=what).add_argument("facility")
    add_log_options(p)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    a = parser().parse_args(arguments)
    now = time.time() if a.now is None else a.now
    if a.command == "start":
        rules = GroupRules(
            bound=a.bound,
            minimum=a.minimum,
            maximum=a.maximum,
            window_seconds=a.window,
            window_maximum_seconds=max(a.window, a.window * 10),
            debias=not a.no_debias,
        )
        driver, reduced = SemiDecentralised.start(a.state, a.member, rules, weights=a.weights), []
    else:
        driver = SemiDecentralised(a.state)
        if a.command == "ready":
            reduced = driver.ready(a.facility, a.update, now)
        elif a.command == "tick":
            reduced = driver.tick(now)
        else:
            reduced = getattr(driver, a.command)(a.facility, now)
    if a.json:
        print(json.dumps(describe(reduced, driver.scheduler), indent=2))
    else:
        for item in reduced:
            print(item)
        print(f"waiting: {', '.join(map(str, driver.scheduler.waiting)) or 'nobody'}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
