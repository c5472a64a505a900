"""How far a run is, for its live table and console: events of steps and jobs in, the state of each facility out.

A state machine that reads no file and asks no scheduler; `coordinator.engine.recorder` feeds it and keeps what it says.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from coordinator.archive.rounds import DISCARDED
from coordinator.durations import format_duration
from coordinator.engine.live import SILENT, FacilityState, facility_sentence
from coordinator.engine.queues import facility_of
from coordinator.events.event import Event
from coordinator.rounds.ahead import waited_sentence
from facility.exchange.messages.ahead import Waited

LATE = "late"
"""State of a facility whose round has closed while its job goes on."""
DROPPED = f"{LATE}, its update is discarded"
"""State of a facility whose job goes on though its round has closed, and nothing of what it trains will count."""
WAITS_FOR_LOGIN = "waiting for login"
"""State of a facility that refuses the login."""
LINE_SECONDS = 60.0
"""Between two lines about the steps of one facility."""
DOING = {
    "send": "sending",
    "keys": "drawing keys",
    "train": "training",
    "receive": "receiving",
    "unmask": "unmasking",
}
"""What a facility does in a step of this kind."""
WAITS = "waiting for the facilities"
"""What the coordinator does while they work."""
STEPS = {"start": "looking at the archive", "aggregate": "averaging", "report": "reporting"}
COMPARING = {"alone": "training alone", "models": "comparison of models"}
"""What follows the last round where models are compared."""


@dataclass
class Progress:
    """State of a run, fed event by event. `clock` gives seconds."""

    facilities: list[str]
    rounds: int
    clock: Callable[[], float] = time.monotonic
    done: int = 0
    """Rounds that were complete when the run began."""
    round: int | None = None
    """Round under way; equal to `rounds` during the final evaluation."""
    phase: str = ""
    """What follows the final evaluation, while it does; empty: nothing."""
    step: str = "starting"
    """What the coordinator does."""
    states: dict[str, str] = field(default_factory=dict)
    """By facility: waiting, queued, training, receiving, done, or why it is out."""
    since: dict[str, float] = field(default_factory=dict)
    """When each facility's state began."""
    live: dict[str, FacilityState] = field(default_factory=dict)
    """Each facility's state with what its running job reports; its times are seconds since 1970."""
    wall: Callable[[], float] = time.time
    unit: Callable[[], str] = lambda: "tokens"
    """What the speeds count: tokens, or images."""
    problems: list[str] = field(default_factory=list)
    _told: dict[str, float] = field(default_factory=dict)
    """By facility: when its steps were last reported as a line."""
    _late: dict[str, int] = field(default_factory=dict)
    """By facility: the latest round that has closed while its job goes on."""
    _away: dict[str, float] = field(default_factory=dict)
    """By facility that does not answer: since when, in seconds since 1970."""
    _before_login: dict[str, str] = field(default_factory=dict)
    """By facility that refuses the login: its state before."""

    def __post_init__(self) -> None:
        for name in self.facilities:
            self._set(name, "waiting")

    def feed(self, event: Event) -> str | None:
        """Take one event; returns a sentence when it means something to a person."""
        handler = getattr(self, f"_on_{event.kind}", None)
        return handler(event) if handler is not None else None

    @property
    def heading(self) -> str:
        """How far all of it is: as rounds are numbered from 0, how many are complete is said beside the number."""
        after_all = self.round is not None and self.round >= self.rounds
        complete = self.done if self.round is None else self.round
        return self.title if after_all else f"{self.title} ({complete} of {self.rounds} complete)"

    @property
    def title(self) -> str:
        if self.round is None:
            return f"after round {self.done - 1}" if self.done else "before the first round"
        return self.phase or "final evaluation" if self.round >= self.rounds else f"round {self.round}"

    def start_again(self) -> None:
        """StreamFlow has ended too soon, and is started again after a pause."""
        self.step = "starting again"

    def _on_starting(self, event: Event) -> None:
        self.round = int(event["round"])

    def _on_executing(self, event: Event) -> str | None:
        leaf = str(event["step"]).rpartition("/")[2]
        kind, _, name = leaf.partition("_")
        if kind == "receive" and name in self._late and self._late[name] == self.round:
            return None  # there is nothing to receive yet
        if kind == "send" and self.states.get(name) == LATE:
            return None  # a model that its job does not take
        if name in self.states and kind in DOING:
            doing = self._at_work if kind == "train" else DOING[kind]
            self._set(name, doing)
            self.step = WAITS
            return f"{self.title}: {name} {doing}"
        self.step = STEPS.get(leaf, leaf)
        return f"{self.title}: {self.step}" if leaf == "aggregate" else None

    def _on_earlier(self, event: Event) -> str | None:
        """A job that a killed run left is at work for this round: nothing is heard of its steps."""
        name = str(event["facility"])
        if self.states.get(name) != self._at_work:
            return None
        self._set(name, f"waiting for the end of job {event['job']}, of an earlier run")
        return f"{self.title}: {name}: job {event['job']} of an earlier run is at work: its end is waited for"

    def _on_submitted(self, event: Event) -> str | None:
        name = facility_of(str(event["step"]))
        if name not in self.states:
            return None
        self._set(name, f"queued as job {event['job']}")
        return f"{self.title}: {name} queued as job {event['job']}"

    def _on_ahead(self, event: Event) -> str | None:
        name = facility_of(str(event["step"]))
        return f"{self.title}: {name}: job {event['job']} is in the queue for what follows" if name else None

    def _on_waited(self, event: Event) -> str:
        waited = Waited(seconds=float(event["seconds"]), nodes=int(event["nodes"]), handed=bool(event["handed"]))
        return waited_sentence(waited, str(event["facility"]), str(event["job"]))

    def _on_estimated(self, event: Event) -> None:
        if (one := self.live.get(facility_of(str(event["step"])))) is not None:
            one.begins = str(event["begins"])

    def _on_began(self, event: Event) -> str | None:
        name = facility_of(str(event["step"]))
        if name not in self.states or not self.states[name].startswith("queued"):
            return None
        self._set(name, self._at_work)
        return f"{self.title}: {name}: its job has begun"

    def _on_requeued(self, event: Event) -> str | None:
        """A late facility stays late: its round goes on without it."""
        name = facility_of(str(event["step"]))
        if self.states.get(name) != self._at_work:
            return None
        self._set(name, f"queued as job {event['job']}")
        return f"{self.title}: {name}: job {event['job']} was requeued by its scheduler and waits again"

    def _on_progress(self, event: Event) -> str | None:
        """A line as the steps begin, and then every `LINE_SECONDS`."""
        name = facility_of(str(event["step"]))
        if (one := self.live.get(name)) is None:
            return None
        if self.states[name].startswith("queued"):
            self._set(name, self._at_work)
            one = self.live[name]
        one.stage, one.step, one.steps = str(event["stage"]), int(event["done"]), int(event["steps"])
        one.loss, one.tokens_per_second = event["loss"], float(event["tokens_per_second"])
        one.seconds_left, one.heard = event["seconds_left"], event.time or self.wall()
        if one.stage == "waiting":
            return f"{self.title}: {name}: an earlier job of this round is at work: its end is waited for"
        if one.stage != "training" or self.clock() - self._told.get(name, -LINE_SECONDS) < LINE_SECONDS:
            return None
        self._told[name] = self.clock()
        return f"{self.title}: {name}: {facility_sentence(one, self.wall(), self.unit())}"

    def _on_received(self, event: Event) -> str:
        self._set(event["facility"], "done")
        return f"{self.title}: {event['facility']} done"

    def _on_refused(self, event: Event) -> str:
        self._set(event["facility"], DROPPED if event["reason"] == DISCARDED else f"out: {event['reason']}")
        return f"{self.title}: goes on without {event['facility']}: {event['reason']}"

    def _on_quorum(self, event: Event) -> str:
        seconds = float(event["seconds"])
        stays = f"stays open for {format_duration(seconds)}" if math.isfinite(seconds) else "waits for all"
        return f"round {event['round']}: {event['delivered']} have delivered, the quorum; it {stays} ({event['why']})"

    def _on_late(self, event: Event) -> str:
        """Keep what is known of a late facility's job, which goes on."""
        name, self._late[event["facility"]] = event["facility"], int(event["round"])
        if name in self.states and self.states[name] in ("training", "waiting"):
            self.states[name] = self.live[name].state = LATE
            self.since[name], self.live[name].since = self.clock(), self.wall()
        return f"round {event['round']} closes without {name}: {event['reason']}"

    def _on_complete(self, event: Event) -> str:
        title, self.round, self.step = self.title, int(event["round"]) + 1, "between rounds"
        return f"{title}: complete, {event['decision']}"

    def _on_comparing(self, event: Event) -> None:
        self.round, self.phase = int(event["round"]), COMPARING.get(str(event["what"]), "")

    def _on_compared(self, event: Event) -> str:
        return f"comparison of models: {event['text']}"

    def _on_again(self, event: Event) -> str:
        return f"round {event['round']} is asked for again: {event['reason']}"

    def _on_login_refused(self, event: Event) -> str:
        name = str(event["facility"])
        self._set_away(name, 0.0)
        self._before_login[name] = self.states.get(name, "")
        self._set(name, WAITS_FOR_LOGIN)
        return (
            f"{name} is {WAITS_FOR_LOGIN}: {event['host']} refuses it ({event['reason']}). `crossfed login {name}` "
            "in another terminal, or renew the key or certificate by hand; its jobs and the other facilities go on, "
            "nothing is lost"
        )

    def _on_login_works(self, event: Event) -> str:
        name = str(event["facility"])
        before = self._before_login.pop(name, "")
        if self.states.get(name) == WAITS_FOR_LOGIN:
            self._set(name, before)
        return f"{name}: the login works again, going on"

    def _on_away(self, event: Event) -> str | None:
        return self.find_away(str(event["facility"]), self.words_of_away(event))

    def _on_back(self, event: Event) -> str | None:
        return self.find_back(str(event["facility"]))

    def words_of_away(self, event: Event) -> str:
        """Who does not answer, and why."""
        return f"{event['facility']} {SILENT}: {event['reason']}"

    def words_of_back(self, name: str) -> str:
        """Who answers again."""
        return f"{name} answers again"

    def find_away(self, name: str, sentence: str) -> str | None:
        """A facility does not answer, whoever asked it: the sentence to report, once while it lasts. May be called in
        any thread, as `find_back`."""
        if name in self._away or self.states.get(name) in (None, WAITS_FOR_LOGIN):
            return None
        self._set_away(name, self.wall())
        return f"{sentence}; it is waited for, its jobs and the other facilities go on"

    def find_back(self, name: str) -> str | None:
        """It answers: the sentence to report, if it did not before."""
        if name not in self._away:
            return None
        self._set_away(name, 0.0)
        return self.words_of_back(name)

    def _set_away(self, name: str, since: float) -> None:
        if since:
            self._away[name] = since
        else:
            self._away.pop(name, None)
        if name in self.live:
            self.live[name].away = since

    @property
    def _at_work(self) -> str:
        evaluates = (self.round or 0) >= self.rounds and self.phase != COMPARING["alone"]
        return "evaluating" if evaluates else "training"

    def _on_problem(self, event: Event) -> str:
        self.problems.append(event["text"])
        return event["text"]

    def _set(self, name: str, state: str) -> None:
        if name in self.facilities:
            self.states[name] = state
            self.since[name] = self.clock()
            before = self.live.get(name, FacilityState())
            at_work = state in ("training", "evaluating") and before.job and before.state.startswith("queued")
            job = state.partition("as job ")[2] or (before.job if at_work else "")
            self.live[name] = FacilityState(state=state, since=self.wall(), job=job)
            self.live[name].away = self._away.get(name, 0.0)  # read last: another thread may just have set it
