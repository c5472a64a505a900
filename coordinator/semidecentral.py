"""Semi-decentralised rounds over facilities: groups average as updates arrive, nobody waits for the slowest.

    python -m coordinator.semidecentral --state DIR start --member it --member cs --member de --window 300
    python -m coordinator.semidecentral --state DIR ready it --update DIR
    python -m coordinator.semidecentral --state DIR tick | leave de | join de | finish it

The same pure scheduler that groups replicas inside a facility (`facility.exchange.groups`): "ready" is that a
facility's update has arrived, "reduce" is the weighted mean of the group's files, which becomes the next model of
every member. Nothing stays alive between calls: the state is a directory, written after the models it names, so a
call that was killed is simply made again. `finish` of every member gives the final mean over all.

A facility's update here is a whole checkpoint (not a difference), since members of a group started from different
models.
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
from pathlib import Path
from typing import Any, Literal

from coordinator.aggregate import aggregate
from coordinator.averaging.settings import AggregationSettings
from facility.exchange.durable import write_json
from facility.exchange.errors import ConfigurationError, InputError, UpdateRefused, exit_on_error
from facility.exchange.groups import Group, GroupRules, GroupScheduler
from facility.exchange.manifest import NAME, Manifest, read_manifest, verify_manifest, write_manifest
from facility.exchange.report import REPORT, read_report

STATE = "state.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Reduced:
    """A group that has been carried out."""

    group: Group
    model: Path
    """The mean: next model of every member."""


class SemiDecentralised:
    """The scheduler driven by arriving files."""

    def __init__(self, state: Path) -> None:
        self.state = Path(state)
        try:
            raw = json.loads((self.state / STATE).read_text())
            if raw["format"] != FORMAT:
                raise ConfigurationError(f"format {raw['format']}, expected {FORMAT}", file=self.state / STATE)
            self.scheduler = GroupScheduler.restore(raw["scheduler"])
            self.weights: Literal["tokens", "equal"] = raw["weights"]
            self.updates: dict[str, str] = raw["updates"]
            self.models: dict[str, str] = raw["models"]
            self.gone: dict[str, int] = raw["gone"]
        except FileNotFoundError:
            raise InputError(f"{self.state / STATE} is missing: begin with `start --member NAME ...`") from None
        except (KeyError, ValueError, TypeError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"is not a state of this command: {error!r}", file=self.state / STATE) from None

    @classmethod
    def start(
        cls, state: Path, members: Sequence[str], rules: GroupRules, *, weights: str = "tokens"
    ) -> SemiDecentralised:
        """A new state. Raises `InputError` where one is already, or for fewer than two members."""
        state = Path(state)
        if (state / STATE).exists():
            raise InputError(f"{state / STATE} exists already: choose another directory, or go on with `ready`")
        if len(set(members)) != len(members) or len(members) < 2:
            raise InputError(f"members are {list(members)}, expected two or more different names")
        if bad := [m for m in members if not m or "/" in m or m.startswith(".")]:
            raise InputError(f"member {bad[0]!r} cannot name a directory")
        state.mkdir(parents=True, exist_ok=True)
        scheduler = GroupScheduler(members, rules)
        write_json(
            state / STATE,
            {"format": FORMAT, "scheduler": scheduler.snapshot(), "weights": weights, "updates": {}, "models": {}, "gone": {}},
        )  # fmt: skip
        return cls(state)

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
            raise InputError(f"{facility!r} is no member; members are {', '.join(map(str, self.scheduler.members))}")
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

    def join(self, facility: str, now: float) -> list[Reduced]:
        """A facility comes back, or a new one comes: it first receives, then contributes."""
        if facility in self.scheduler.members:
            raise InputError(f"facility {facility!r} is a member already")
        return self._carry_out(self.scheduler.join(facility, now, rounds=self.gone.pop(facility, 0)))

    # -- behind -----------------------------------------------------------------------------------------------------
    def _check(self, facility: str, update: Path) -> None:
        if facility not in self.scheduler.members:
            raise InputError(
                f"{facility!r} is no member; members are {', '.join(map(str, self.scheduler.members))} (`join` adds one)"
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
            model = self._reduce(group)
            for member in group.members:
                self.models[str(member)] = str(model)
            reduced.append(Reduced(group=group, model=model))
        write_json(
            self.state / STATE,
            {"format": FORMAT, "scheduler": self.scheduler.snapshot(), "weights": self.weights,
             "updates": self.updates, "models": self.models, "gone": self.gone},
        )  # fmt: skip
        return reduced

    def _reduce(self, group: Group) -> Path:
        """Weighted mean of the members' updates, as a model of its own."""
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
        with tempfile.TemporaryDirectory(dir=self.state) as scratch:
            base = Path(scratch) / "base"
            base.mkdir()
            for path in first.iterdir():
                if path.name not in (NAME, REPORT):
                    (base / path.name).symlink_to(path.resolve())
            aggregate(
                base=base,
                updates=list(directories.values()),
                out=out,
                settings=AggregationSettings(rule="mean", weights={m: weights[m] for m in directories}),
            )
        sent = read_manifest(first)
        write_manifest(
            out,
            Manifest(
                kind="model",
                federation=sent.federation,
                round=max(group.rounds),
                dtypes=sent.dtypes,
                parameters=sent.parameters,
                extra={"group": group.number, "members": list(group.members), "final": group.final},
            ),
        )
        return out


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
    p = argparse.ArgumentParser(prog="python -m coordinator.semidecentral", description=__doc__.split("\n\n")[0])
    p.add_argument("--state", type=Path, required=True, metavar="DIR", help="where the state and group models are kept")
    p.add_argument("--now", type=float, metavar="SECONDS", help="time of the event (default: the clock, Unix seconds)")
    p.add_argument("--json", action="store_true", help="print the groups as JSON")
    commands = p.add_subparsers(dest="command", required=True)
    start = commands.add_parser("start", help="a new state")
    start.add_argument("--member", action="append", default=[], metavar="NAME", help="a facility; repeat")
    start.add_argument("--bound", type=int, default=3, help="groups are connected every so many rounds (default 3)")
    start.add_argument("--minimum", type=int, default=2, help="members of a group at least (default 2)")
    start.add_argument("--maximum", type=int, default=0, help="members of a group at most (default 0: no limit)")
    start.add_argument("--window", type=float, default=300.0, help="seconds a first arrival waits (default 300)")
    start.add_argument("--no-debias", action="store_true", help="do not weigh by mean rounds / own rounds")
    start.add_argument("--weights", choices=["tokens", "equal"], default="tokens", help="(default tokens)")
    ready = commands.add_parser("ready", help="a facility's update has arrived")
    ready.add_argument("facility")
    ready.add_argument("--update", type=Path, required=True, metavar="DIR", help="the update, with its manifest")
    commands.add_parser("tick", help="close groups whose window has passed")
    for name, what in (("leave", "nobody waits for it any longer"), ("join", "it comes, or comes back"),
                       ("finish", "it sends no more updates")):  # fmt: skip
        commands.add_parser(name, help=what).add_argument("facility")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    a = parser().parse_args(arguments)
    now = time.time() if a.now is None else a.now
    if a.command == "start":
        rules = GroupRules(bound=a.bound, minimum=a.minimum, maximum=a.maximum, window_seconds=a.window,
                           window_maximum_seconds=max(a.window, a.window * 10), debias=not a.no_debias)  # fmt: skip
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
            members = ", ".join(f"{m} {w:.3f}" for m, w in zip(item.group.members, item.group.weights, strict=True))
            print(f"group {item.group.number} ({item.group.reason}): {members} -> {item.model}")
        print(f"waiting: {', '.join(map(str, driver.scheduler.waiting)) or 'nobody'}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_on_error(main))
