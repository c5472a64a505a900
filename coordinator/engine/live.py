"""How far each facility is, for a person: a snapshot of the run, and its table. `crossfed status --follow` reads the
snapshot that `crossfed run` leaves, so that watching costs no login.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from coordinator.archive.many import first_groups, group_for_display, kind_of, names_of, too_many_to_list
from coordinator.archive.narrow import Fitted
from coordinator.durations import format_duration
from coordinator.engine.run_process import process_lives
from coordinator.shown_text import safe_line
from facility.exchange.files.durable import write_text
from facility.exchange.json_values import values_in

FILE = "live.json"
BEGINS = re.compile(r"\d{4}-(0[1-9]|1[0-2])-(\d\d)T(\d\d:\d\d)(?::\d\d)?")
"""A time as Slurm writes it, which no line can break."""
MONTHS = "Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split()
STALE_SECONDS = 30.0
"""A snapshot older than this is of a run that has ended or was killed, where its process cannot be looked for: a living
one renews it."""


ALWAYS = 3
"""The first columns of the table, which it has whatever is in them: facility, state, for."""
LAST_AT_WORK = 5
STATES = ("waiting", "queued", "training", "late", "receiving", "done")
"""Those that need no attention."""
STAGES = {"waiting": "waiting for an earlier job"}
"""What a job says that it does, where that word alone would not do."""
SILENT = "does not answer"
"""State of a facility that was waiting for what comes next when its login node was found away."""
OTHERS = "out for other reasons: crossfed explain NAME"


@dataclass(kw_only=True)
class FacilityState:
    """One facility, now."""

    state: str = "waiting"
    """waiting, queued, training, receiving, done, or why it is out."""
    since: float = 0.0
    """Seconds since 1970, as all times here."""
    job: str = ""
    begins: str = ""
    """When the scheduler expects the waiting job to begin, in its own words."""
    stage: str = ""
    step: int = 0
    steps: int = 0
    loss: float | None = None
    tokens_per_second: float = 0.0
    seconds_left: float | None = None
    heard: float = 0.0
    """Last sign of life of the job; 0: none yet."""
    away: float = 0.0
    """Since when it does not answer; 0: it does."""

    @property
    def condition(self) -> str:
        """Its state; of one that does not answer, that first."""
        if not self.away:
            return self.state
        return f"{SILENT}, {self.state}" if self.state not in ("waiting", "done") else SILENT


@dataclass(kw_only=True)
class Snapshot:
    """A run, now."""

    federation: str
    heading: str
    coordinator: str
    """What the coordinator does."""
    time: float
    round_end: float = 0.0
    """When the round under way is expected to be complete; 0: not known."""
    rounds_after: float = 0.0
    """Seconds that the rounds after it are expected to take."""
    unit: str = "tokens"
    """What the speeds count: tokens, or images."""
    ended: str = ""
    """Why the run ended; empty: it goes on."""
    process: str = ""
    """Which process the run is (`run_process.this_process`); empty: not known."""
    facilities: dict[str, FacilityState] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        """Whether the run goes on: as its process says, where it is of this host; else by the time of the snapshot."""
        if self.ended:
            return False
        lives_on = process_lives(self.process)
        return time.time() - self.time < STALE_SECONDS if lives_on is None else lives_on


def write_snapshot(workdir: Path, snapshot: Snapshot) -> None:
    write_text(workdir / FILE, json.dumps(dataclasses.asdict(snapshot)) + "\n")


def read_snapshot(workdir: Path) -> Snapshot | None:
    """The latest one; None where there is none."""
    try:
        raw = values_in(workdir / FILE)
        raw["facilities"] = {name: FacilityState(**one) for name, one in raw["facilities"].items()}
        return Snapshot(**raw)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def to_show(snapshot: Snapshot) -> tuple[list[str], dict[str, list[str]]]:
    """Facilities that are shown one by one, and by state those that one line stands for.

    Of many, those that are out and the last `LAST_AT_WORK` of those at work are shown by name; of many that are out,
    one line stands for all that are for the same reason.
    """
    if not too_many_to_list(snapshot.facilities):
        return list(snapshot.facilities), {}
    states = {name: one.condition for name, one in snapshot.facilities.items()}
    known = {name: next((state for state in STATES if text.startswith(state)), "") for name, text in states.items()}
    at_work = [name for name, one in snapshot.facilities.items() if one.stage and known[name] in ("training", "late")]
    last = sorted(at_work, key=lambda name: -(snapshot.facilities[name].seconds_left or 0.0))[:LAST_AT_WORK]
    out = [name for name in snapshot.facilities if not known[name]]
    groups, rest = first_groups(group_for_display(out, lambda name: kind_of(states[name], name)))
    alone = {*last, *(names[0] for names in groups if len(names) == 1)}
    named = [name for name in known if name in alone]
    together = {states[names[0]]: names for names in groups if len(names) > 1}
    if rest:
        together[OTHERS] = rest
    together |= {state: [n for n in known if known[n] == state and n not in last] for state in STATES}
    return named, {state: names for state, names in together.items() if names}


def live_table(snapshot: Snapshot, now: float | None = None, *, below: str = "") -> Group:
    """One line a facility; of many, one line for those in the same state. Numbers that no facility has yet leave their
    room to the states. The heading and what is `below` take the width of the terminal, however narrow the table is."""
    now = time.time() if now is None else now
    title = ", ".join(filter(None, (f"{snapshot.heading}: {safe_line(snapshot.coordinator)}", _end(snapshot, now))))
    result = Table()
    alone, together = to_show(snapshot)
    rows = [(name, *_cells(snapshot.facilities[name], now, narrow=True)) for name in alone]
    for state, names in together.items():
        longest = max(now - snapshot.facilities[name].since for name in names)
        rows.append((_names_in_state(state, names), safe_line(state), f"up to {format_duration(longest)}", *[""] * 5))
    heads = ("facility", "state", "for", "step", "loss", f"{snapshot.unit}/s", "time\nleft", "last\nheard")
    for at, head in enumerate(heads):
        if at < ALWAYS or any(row[at] for row in rows):
            result.add_column(head, justify="left" if at < 2 else "right")
    for row in rows:
        result.add_row(*(escape(text) for at, text in enumerate(row) if at < ALWAYS or any(one[at] for one in rows)))
    speed, left, heard = heads[-3:]
    shown = Fitted(result, ("facility", "state", "step"), (speed, heard, "loss", "step", left, "for"))
    return Group(Text(title, style="italic"), shown, *([Text(below, style="dim italic")] if below else []))


def live_lines(snapshot: Snapshot, now: float | None = None) -> list[str]:
    """The live view as plain lines, for a console without a display."""
    now = time.time() if now is None else now
    alone, together = to_show(snapshot)
    lines = [f"{name}: {facility_sentence(snapshot.facilities[name], now, snapshot.unit)}" for name in alone]
    lines += [f"{_names_in_state(state, names)}: {safe_line(state)}" for state, names in together.items()]
    return [f"{snapshot.heading}: {line}" for line in [*lines, *filter(None, [_end(snapshot, now)])]]


def waiting_sentence(snapshot: Snapshot, now: float) -> str:
    """What the run waits for now, in one line: what the coordinator does, and each facility that is not done."""
    alone, together = to_show(snapshot)
    states = {name: one for name, one in snapshot.facilities.items() if name in alone and one.state != "done"}
    parts = [f"{name}: {facility_sentence(one, now, snapshot.unit)}" for name, one in states.items()]
    parts += [
        f"{_names_in_state(state, names)}: {safe_line(state)}" for state, names in together.items() if state != "done"
    ]
    return f"{snapshot.heading}: {'; '.join([safe_line(snapshot.coordinator), *parts])}"


def _names_in_state(state: str, names: list[str]) -> str:
    """How many facilities are in a state; for those that need attention, their names too."""
    return f"{len(names)} facilities" + ("" if state in STATES else f" ({names_of(names)})")


def _end(snapshot: Snapshot, now: float) -> str:
    """When all rounds are expected to be complete, with the day unless it is today; '' where that is not known.

    No end is known of a round that lasts longer than it was expected to: a time would move on with the clock.
    """
    if not snapshot.round_end or snapshot.ended:
        return ""
    if now > snapshot.round_end:
        after = f"; those after it are expected to take {format_duration(snapshot.rounds_after)}"
        return f"this round takes longer than the last ones{after if snapshot.rounds_after else ''}"
    moment, today = time.localtime(snapshot.round_end + snapshot.rounds_after), time.localtime(now)
    day = "" if moment[:3] == today[:3] else time.strftime("%Y-%m-%d ", moment)
    return f"all rounds are expected to be complete about {day}{time.strftime('%H:%M', moment)}"


def facility_sentence(one: FacilityState, now: float, unit: str = "tokens") -> str:
    """One facility in a line of text."""
    state, lasted, step, loss, speed, left, heard = _cells(one, now)
    since = f"{state}{',' if ', ' in state else ''} for {lasted}"
    parts = [since, f"step {step}" if step else "", f"loss {loss}" if loss else ""]
    parts += [
        f"{speed} {unit}/s" if speed else "",
        f"{left} left" if left else "",
        f"heard {heard} ago" if heard else "",
    ]
    return ", ".join(filter(None, parts))


def _cells(one: FacilityState, now: float, *, narrow: bool = False) -> tuple[str, ...]:
    """`narrow`: with few words, for the column of a table, which has another for the time in a state."""
    state = safe_line(one.condition)
    if one.state.startswith("queued") and not one.away:
        begins = safe_line(one.begins)
        if narrow:
            state += f" until about {BEGINS.sub(_short, begins)}" if begins else ""
        else:
            state += f" since {_clock(one.since)}" + (f", expected to begin {begins}" if begins else "")
    at_work = bool(one.stage)
    if at_work and one.stage != "training" and not one.away:
        state = STAGES.get(one.stage, one.stage)
    steps = f"{one.step} of {one.steps}" if at_work and one.steps else ""
    time_of = _minutes if narrow else format_duration
    return (
        state,
        time_of(now - (one.away or one.since)),
        steps,
        f"{one.loss:.4f}" if at_work and one.loss is not None else "",
        f"{one.tokens_per_second:,.0f}" if at_work and one.tokens_per_second else "",
        time_of(one.seconds_left) if at_work and one.seconds_left is not None and one.stage == "training" else "",
        time_of(now - one.heard) if at_work and one.heard else "",
    )


def _short(found: re.Match[str]) -> str:
    """`22 Nov 11:00`: words that a narrow column can break."""
    return f"{found[2]} {MONTHS[int(found[1]) - 1]} {found[3]}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))


def _minutes(seconds: float) -> str:
    """As `span`, without the seconds of minutes: `3 min`."""
    return re.sub(r":\d\d min", " min", format_duration(seconds))
