"""What CrossFed asks of a scheduler, and the one rule by which its answers are read.

A job has ended only when the scheduler itself names a terminal state for it, or says that it does not know the id. No
answer, an empty answer and an unknown state are silence: they are asked again and never count as an end.

An answer is another institution's text: ids are plain words of limited length that no command takes for an option, and
states, reasons and details are one printable line.
"""

from __future__ import annotations

import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from coordinator.schedulers.partition import Partition, Wish
from facility.exchange.json_text import parse_values
from facility.exchange.messages.outcome import Outcome
from facility.exchange.messages.strict_json import clean_text, is_printable

LONGEST_STATE, LONGEST_REASON, LONGEST_PATH = 40, 400, 4096
"""Characters."""
KILLED = re.compile(r"(?:^|: )(?:Killed|Terminated)\s*\Z|: line \d+: +\d+ (?:Killed|Terminated)\b")
"""What shells say of a program that a signal ended."""
ANSWER_BYTES = 2 << 20
"""Of a scheduler's answer about our jobs: of hundreds of them, with all that their environments hold."""
OUTPUT_BYTES = 1 << 16
"""What is read of a job's output: its end."""
FORGOTTEN = "FORGOTTEN"
"""State of a job whose id the scheduler says it does not know (any more)."""
NOT_TAKEN = "REFUSED"
"""State of a job that was submitted and not taken."""
OVERDUE = "OVERDUE"
"""State of a job that its scheduler reports as running long after its time limit."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job in a queue."""

    id: str
    state: str
    """As the scheduler calls it."""
    began: bool
    reason: str = ""
    """Why it waits, in the scheduler's words."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", clean_text(self.state, LONGEST_STATE))
        object.__setattr__(self, "reason", clean_text(self.reason, LONGEST_REASON))


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a job ended."""

    state: str
    """As the scheduler calls it."""
    code: int | None
    """Exit code of the job's script where it ended by itself; None: it was ended, or the scheduler does not say."""
    detail: str = ""
    """The scheduler's words about it."""
    output: str = ""
    """File with what the job printed, where the scheduler names it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", clean_text(self.detail, LONGEST_REASON))
        if not self.output.startswith("/") or len(self.output) > LONGEST_PATH or not is_printable(self.output):
            object.__setattr__(self, "output", "")

    @property
    def step_code(self) -> int:
        """Exit code of the workflow step: any but ours is `skipped`, since a step that fails ends the run for all."""
        return step_code(self.code)

    @property
    def problem(self) -> str:
        """A sentence for the log when the job did not end as it should, else ''."""
        if self.code in (Outcome.DONE, Outcome.SKIPPED):
            return ""
        if self.state == FORGOTTEN:
            return f"ended, its exit code is not known ({self.detail}); what it left decides"
        if self.state == NOT_TAKEN:
            return f"was not taken: {self.detail}"
        if self.state == OVERDUE:
            return f"was taken for lost: {self.detail}"
        return f"did not end well: {self.detail or self.state}" + (
            f"; its output is {self.output}" if self.output else ""
        )


def exit_code(code: object) -> int | None:
    """A scheduler's word for an exit code; None: it is not a whole number of at most ten digits."""
    return int(str(code)) if re.fullmatch(r"-?[0-9]{1,10}", str(code)) else None


def read_answer(text: str) -> Any:
    """The JSON in a scheduler's answer, complaints before and after an object left out; None where it is none."""
    start, end = text.find("{"), text.rfind("}")
    for part in (text, text[start : end + 1]):
        try:
            return parse_values(part, strict=False)
        except ValueError:
            continue
    return None


def step_code(code: int | None) -> int:
    """A job's exit code as the workflow knows it: 0, or 7 for everything else."""
    return code if code in (Outcome.DONE, Outcome.SKIPPED) else int(Outcome.SKIPPED)


class Scheduler(ABC):
    """Finds our jobs at a facility by their name. Every method gives a shell line or reads what one printed."""

    name: ClassVar[str]
    """`deployment.type` in federation.yml."""
    title: ClassVar[str]
    """As its users write it."""
    waiting: ClassVar[frozenset[str]] = frozenset()
    """States of a job that has not begun."""
    job_id: ClassVar[re.Pattern[str]] = re.compile(r"[0-9][A-Za-z0-9_.\[\]@%,-]{0,99}")
    """What a line of a listing begins with; banners and complaints do not. It begins no option of a command."""
    advice: ClassVar[Sequence[tuple[str, str]]] = ()
    """Patterns of reasons that mark a stuck job, and what to do; any other reason is ordinary waiting."""

    @abstractmethod
    def listing(self, name: str) -> str:
        """Shell line that lists those of our jobs with this (quoted) name that have not ended, with why they wait."""

    @abstractmethod
    def cancel(self, name: str) -> str:
        """Shell line that cancels all our jobs of this (quoted) name, waiting or running."""

    @abstractmethod
    def cancel_waiting(self, name: str) -> str:
        """Shell line that cancels only those that have not begun."""

    def line(self, command: str) -> str:
        """The shell line of a command that prints everything in one stream."""
        return f"{{ {command}; }} 2>&1"

    def is_answer(self, text: str, code: int) -> bool:
        """True when a listing or a question about jobs was answered."""
        return code == 0

    def read_listing(self, text: str) -> list[Job]:
        """Jobs of the listing's lines `id state reason`; lines that are none (banners, complaints) are passed over."""
        found = []
        for line in text.splitlines():
            words = line.split(maxsplit=2)
            if len(words) >= 2 and words[1].isupper():
                found.append((words[0], words[1], "".join(words[2:]).strip()))
        return self.jobs(found)

    def jobs(self, rows: Iterable[tuple[str, str, str]]) -> list[Job]:
        """Jobs from rows of (id, state, reason); rows whose id is not of this scheduler's form are left out."""
        return [self.job(*row) for row in rows if self.job_id.fullmatch(row[0])]

    def job(self, id: str, state: str, reason: str) -> Job:
        """A job in the queue; the reason counts only while it waits."""
        began = self.has_begun(state)
        return Job(id=id, state=state, began=began, reason="" if began else reason)

    def has_begun(self, state: str) -> bool:
        """True for the state of a job that has left the queue."""
        return state not in self.waiting

    def what_to_do(self, job: Job) -> str:
        """A sentence for a job whose reason does not clear by itself, else ''."""
        for pattern, sentence in self.advice:
            if not job.began and re.fullmatch(pattern, job.reason):
                return sentence.replace("{id}", job.id)
        return ""


class BatchScheduler(Scheduler):
    """A scheduler with a queue: jobs have ids, wait, and end with a state."""

    program: ClassVar[str]
    """Command that submits."""
    connector: ClassVar[str]
    """StreamFlow's connector that submits, as `module:class`."""
    terminal: ClassVar[frozenset[str]]
    """States from which a job does not come back."""
    suspended: ClassVar[frozenset[str]] = frozenset()
    """States of a job that has begun and whose time limit stands still; `waiting` may hold them too."""
    finishing: ClassVar[frozenset[str]] = frozenset()
    """States of a job whose script has ended, while the scheduler clears up after it: an epilog, a node that hangs."""
    silent: ClassVar[Sequence[str]]
    """Words (lower case) in a command's error that mean the scheduler did not answer; anything else is an answer."""
    output_file: ClassVar[str] = ""
    """File in the job's directory to send its output to; '': the scheduler writes there by itself."""

    trial: ClassVar[str] = ""
    """Command that has the scheduler judge the job script on its standard input and takes no job; '': it has none."""
    trial_advice: ClassVar[str] = "correct the template; the words are the scheduler's"
    """What to do where it refuses the script."""
    survey: ClassVar[str] = ""
    """Shell line that prints the scheduler's partitions and the account's rights, for `crossfed quickstart`; fails
    where this scheduler is not in use."""

    def read_partitions(self, text: str) -> list[Partition]:
        """Partitions in what `survey` printed: another institution's text, so what does not parse is left out."""
        return []

    def refusal(self, text: str, job: str) -> str:
        """Why a job with this script cannot run as it asks to, in what `survey` printed; '' where nothing shows it."""
        return ""

    def read_accounts(self, text: str) -> list[str]:
        """Accounts that may be charged, in what `survey` printed; none where the scheduler wants none."""
        return []

    def blocks(self, wish: Wish) -> dict[str, str]:
        """Blocks of `templates/<name>.sh` for these wishes: directives, one a line."""
        return {}

    def end_of_output(self, id: str, path: str) -> str:
        """Shell line that prints the end of what a job printed into `path`."""
        return f"tail -c {OUTPUT_BYTES} {shlex.quote(path)}"

    def submission(self, name: str, output: str) -> str:
        """Shell command that submits the job script on its standard input; `output`: file for what the job prints."""
        raise NotImplementedError(f"{self.title} is submitted to by {self.connector}")

    @abstractmethod
    def cancel_ids(self, ids: Sequence[str]) -> str:
        """Shell line that cancels these jobs."""

    @abstractmethod
    def query(self, ids: Sequence[str]) -> str:
        """Shell line that asks for the state of these jobs, ended ones too."""

    @abstractmethod
    def read_states(self, text: str, code: int, ids: Sequence[str]) -> dict[str, str]:
        """State by id, of those that the answer to `query` names; `FORGOTTEN` where it says that it knows none such."""

    def query_begin(self, id: str) -> str:
        """Shell line that asks when a waiting job is expected to begin; '': this scheduler does not say."""
        return ""

    def read_begin(self, text: str) -> str:
        """The scheduler's estimate in its own words, or '' where it has none."""
        return ""

    @abstractmethod
    def query_ending(self, id: str) -> str:
        """Shell line that asks how a job ended."""

    @abstractmethod
    def read_ending(self, text: str, code: int, id: str) -> Ending | None:
        """How it ended; None when the answer does not say so."""

    def ended(self, states: Mapping[str, str], ids: Iterable[str]) -> list[str]:
        """The `ids` whose state is terminal, or which the scheduler no longer knows."""
        return [one for one in ids if states.get(one) in self.terminal or states.get(one) == FORGOTTEN]

    def waits(self, state: str) -> bool:
        """True for the state of a job in the queue: it has never begun, or was requeued; not of a suspended one."""
        return not self.has_begun(state) and state not in self.suspended

    def limit_runs(self, state: str) -> bool:
        """True for the state of a job whose time limit runs: it has begun, and is neither suspended nor over."""
        return self.has_begun(state) and state not in {*self.suspended, *self.terminal, FORGOTTEN}

    def is_silence(self, text: str) -> bool:
        """True when a command failed because the scheduler did not answer, not because of the request.

        Nor does one answer whose program a signal ended, of which its shell says no more: what it did is not known.
        """
        return KILLED.search(text) is not None or any(words in text.lower() for words in self.silent)

    def read_id(self, text: str) -> str:
        """The id of a submitted job in what the submission printed; '' when there is none."""
        words = [line.split(";")[0].strip() for line in text.splitlines()]
        return next((word for word in reversed(words) if self.job_id.fullmatch(word)), "")
