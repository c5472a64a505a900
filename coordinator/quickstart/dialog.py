"""Questions to a person, each with a proposal; answers may come from the command line, or all be the proposals."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from coordinator.quickstart.propose import Proposal
from facility.exchange.errors import InputError
from facility.exchange.messages.strict_json import clean_text


@dataclass(kw_only=True)
class Dialog:
    """Asks on a terminal, or takes what was given."""

    given: Mapping[str, str]
    """Answers by question, such as `bologna.partition`."""
    yes: bool
    """Take the proposal wherever nothing was given."""
    ask_line: Callable[[str], str] = input
    say: Callable[[str], None] = print
    asked: list[str] = field(default_factory=list)
    """Every question so far."""
    typed: dict[str, str] = field(default_factory=dict)
    """Answers that a person typed, by question."""

    def ask(
        self, question: str, proposal: Proposal, *, must: bool = True, refuse: Callable[[str], str] = lambda answer: ""
    ) -> str:
        """The answer. Raises `InputError` where one is needed and neither given, nor proposed, nor asked for, where the
        input has no further line, and for a given answer that is refused; a typed one is asked for again.

        `refuse`: why an answer cannot be used; empty for one that can."""
        self.asked.append(question)
        if question in self.given:
            if reason := refuse(self.given[question]):
                raise InputError(f"--answer {question}={self.given[question]}: {reason}")
            return self.given[question]
        if self.yes:
            if must and not proposal.value:
                raise InputError(f"{question} needs an answer ({proposal.why}): give --answer {question}=VALUE")
            if proposal.value:
                self.say(f"{question}: {clean_text(f'{proposal.value} ({proposal.why})', 300)}")
            return proposal.value
        others = f"; others: {', '.join(proposal.others[:12])}" if proposal.others else ""
        self.say(clean_text(f"{question}: {proposal.why}{others}", 600))
        while True:
            try:
                line = self.ask_line(f"  {question} [{clean_text(proposal.value, 200)}]: ")
            except EOFError:
                self.say("")
                how = f"give --answer {question}=VALUE, or --yes for all proposals"
                raise InputError(f"{question} has no answer, for the input has ended: {how}") from None
            answer = line.strip() or proposal.value
            reason = refuse(answer) if answer else "an answer is needed here" if must else ""
            if not reason:
                if line.strip():
                    self.typed[question] = answer
                return answer
            self.say(f"  {clean_text(reason, 600)}")

    def again(self) -> str:
        """Options that give the same answers again; empty where nobody typed one."""
        return shlex.join(word for name, value in self.typed.items() for word in ("--answer", f"{name}={value}"))

    def agrees(self, question: str, why: str) -> bool:
        """True for yes, which --yes answers too."""
        return self.ask(question, Proposal(value="yes", why=why)).lower() in ("y", "yes")

    def check_given(self, later: Sequence[str] = ()) -> None:
        """Raise `InputError` when an answer fits no question that was asked, or will be `later`."""
        if unknown := sorted(set(self.given) - set(self.asked) - set(later)):
            raise InputError(f"--answer {unknown[0]} answers no question; asked were {', '.join(self.asked)}")
