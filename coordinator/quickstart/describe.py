"""The text of a federation.yml, with a comment wherever a value has a reason. Every value is one YAML scalar."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.config.schema import FIRST_LINE
from coordinator.quickstart.choice import Choice
from facility.exchange.messages.strict_json import clean_text

PLAIN = re.compile(r"[/~A-Za-z][A-Za-z0-9_./@-]*(:[A-Za-z0-9_./@-]+)*")
"""Text that YAML reads as itself without quotes, the words for true, false and null left aside."""
WORDS = frozenset("y n yes no on off true false null ~".split())


@dataclass(frozen=True, kw_only=True)
class RoundTraining:
    """What the training of one round is, for every facility."""

    rounds: int = 5
    steps: int = 100
    batch_sequences: int = 64
    batch_why: str = ""
    learning_rate: str = "1e-4"


def scalar(text: str) -> str:
    """A YAML scalar that reads as exactly this text."""
    if PLAIN.fullmatch(text) and text.lower() not in WORDS:
        return text
    return '"' + "".join(one if one.isprintable() and one not in '"\\' else f"\\U{ord(one):08x}" for one in text) + '"'


def federation_text(
    name: str, model: str, plan: RoundTraining, choices: Sequence[Choice], signing_key: str = ""
) -> str:
    """federation.yml. `signing_key`: of the coordinator, where a facility has a gate."""
    lines = [
        "# Made by `crossfed quickstart`; yours to edit. `crossfed explain` describes every key.",
        f"name: {scalar(name)}",
        f"model: {scalar(model)} # the model of round 0, relative to this file",
        f"rounds: {plan.rounds}",
        "training: # for every facility; each may change any of it",
        f"  steps: {plan.steps} # optimizer steps of one facility in one round",
        f"  batch_sequences: {plan.batch_sequences}{_comment(plan.batch_why)}",
        f"  learning_rate: {plan.learning_rate}",
    ]
    if signing_key:
        why = _comment("a gate lets only signed models be trained; its site has the public key")
        lines += ["sending:", f"  signing_key: {scalar(signing_key)}{why}"]
    lines += ["facilities:"]
    for choice in choices:
        lines += _facility(choice)
    return FIRST_LINE + "\n".join(lines) + "\n"


def _facility(choice: Choice) -> list[str]:
    lines = [f"  - name: {scalar(choice.name)}", f"    dataset: {scalar(choice.dataset)}"]
    lines[-1] += _comment("prepared before" if choice.prepared else f"made from {choice.data} at the facility")
    if choice.local:
        return [*lines, "    # on this machine: no deployment"]
    login, why = choice.login, choice.why
    lines += [
        "    deployment:",
        f"      type: {choice.scheduler}{_comment(why.get('type', ''))}",
        f"      host: {scalar(login.host)}",
    ]
    for key in ("user", "key", "known_hosts"):
        if value := getattr(login, key):
            lines.append(f"      {key}: {scalar(value)}")
    lines.append(f"      workdir: {scalar(choice.workdir)}{_comment(why.get('workdir', ''))}")
    if choice.gated:
        return [*lines, "      gate: true # template, limits and data are in the site's own policy.yml"]
    lines += [
        f"      template: {scalar(choice.template)}{_comment(why.get('template', ''))}",
    ]
    if choice.fill:
        filled = ", ".join(f"{key}: {scalar(value)}" for key, value in choice.fill.items())
        lines.append(f"      fill: {{{filled}}}{_comment(why.get('partition', ''))}")
    modules = list(choice.install.modules) if choice.install else []
    if modules:
        lines += ["      environment:", f"        home: {scalar(choice.home)}"]
        lines += [f"        modules: [{', '.join(map(scalar, modules))}]"]
    else:
        lines.append(f"      environment: {{home: {scalar(choice.home)}}}{_comment(_installed(choice))}")
    return lines


def _installed(choice: Choice) -> str:
    return choice.install.why if choice.install else ""


def _comment(text: str) -> str:
    said = " ".join(clean_text(text, 120).split())
    return f" # {said}" if said else ""
