"""What was decided for the federation and each facility: the questions in order, answered by a `Dialog`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator.config.deployments import Deployment
from coordinator.quickstart.dialog import Dialog
from coordinator.quickstart.propose import (
    HOURS,
    Install,
    Proposal,
    account,
    install,
    partition,
    placeholders,
    python_version,
    site_template,
    workdir,
)
from coordinator.quickstart.survey import Survey
from coordinator.schedulers.partition import WORD, Partition, Wish
from coordinator.schedulers.scheduler import BatchScheduler
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.messages.job_template import Environment
from facility.exchange.messages.template_inheritance import shipped_templates

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One facility as it will be described and set up."""

    name: str
    login: Deployment
    """How it is reached; type `local` for this machine."""
    data: str
    """Text to prepare, or a prepared dataset, at the facility."""
    prepared: bool
    dataset: str
    home: str = ""
    workdir: str = ""
    scheduler: str = ""
    """`deployment.type`."""
    template: str = ""
    """A shipped template, or the file of the one that was made for this site."""
    template_text: str = ""
    """Text of that file; empty: a shipped one."""
    fill: dict[str, str] = field(default_factory=dict)
    install: Install | None = None
    python: str = "3.11"
    machine: str = ""
    gpus: int = 0
    gated: bool = False
    """The site lets us in by a gate: template, environment and data are its own matter."""
    why: dict[str, str] = field(default_factory=dict)
    """Reasons by key, for comments."""

    @property
    def local(self) -> bool:
        return self.login.type == "local"


def choose_local(name: str, data: str, *, prepared: bool, folder: str) -> Choice:
    """A facility on this machine; `data` that is not prepared will be, into `folder`."""
    dataset = data if prepared else f"{folder}/data/{name}"
    return Choice(name=name, login=Deployment(), data=data, prepared=prepared, dataset=dataset)


def choose(dialog: Dialog, name: str, login: Deployment, survey: Survey, data: str) -> Choice:
    """Ask what is not plain from the survey. Raises `InputError` for an answer that cannot be used."""
    proposal = Proposal(value=f"{survey.home}/crossfed" if survey.home else "", why="CrossFed's own directory there")
    home = dialog.ask(f"{name}.home", proposal, refuse=lambda text: _refused(Environment, home=text))
    why: dict[str, str] = {}
    place = workdir(survey)
    path = dialog.ask(f"{name}.workdir", place, refuse=lambda text: _refused(replace, login, workdir=text))
    why["workdir"] = place.why if path == place.value else ""
    method = install(survey)
    if not method.arguments:
        raise InputError(f"{name}: {method.why}; ask the site which module gives one, or use a container image")
    prepared = survey.data == "prepared"
    chosen = Choice(
        name=name,
        login=login,
        data=data,
        prepared=prepared,
        dataset=data if prepared else f"{home}/data/{name}",
        home=home,
        workdir=path,
        install=method,
        python=python_version(survey),
        machine=survey.machine,
        why=why,
    )
    if survey.scheduler is None:
        why["type"] = "it has no scheduler that CrossFed knows"
        return replace(chosen, scheduler="ssh", template="ssh", gpus=survey.gpus)
    return _with_queue(dialog, chosen, survey, survey.scheduler)


def _with_queue(dialog: Dialog, chosen: Choice, survey: Survey, queue: BatchScheduler) -> Choice:
    """The choice with partition, account and job template of the site's scheduler; adds to its reasons."""
    name, why = chosen.name, chosen.why
    why["type"] = f"{queue.title} answers there"
    proposal = partition(survey.partitions, survey.accounts)
    named = _word(dialog, f"{name}.partition", proposal, must=bool(survey.partitions))
    _known(f"{name}.partition", named, [each.name for each in survey.partitions])
    one = next((each for each in survey.partitions if each.name == named), Partition(name=named))
    why["partition"] = one.describe()
    charged = _word(dialog, f"{name}.account", account(survey.accounts), must=False)
    _known(f"{name}.account", charged, survey.accounts)
    shipped = site_template(chosen.login.host)
    if shipped:
        why["template"] = "the site's own, by its login node's name"
        fill = _fill(dialog, name, shipped, named, charged)
        return replace(chosen, scheduler=queue.name, template=shipped, fill=fill, gpus=one.gpus)
    gpus = _count(dialog, f"{name}.gpus", one.gpus, "GPUs that a job asks for")
    hours = min(HOURS, one.hours or HOURS)
    cores, environment = one.cores or 1, one.environment
    wish = Wish(partition=named, account=charged, cores=cores, gpus=gpus, hours=hours, environment=environment)
    why["template"] = "made from the site's answers; compare it with the site's user guide"
    text = template_for(queue, name, wish)
    return replace(chosen, scheduler=queue.name, template=f"{name}.sh", template_text=text, gpus=gpus)


def template_for(scheduler: BatchScheduler, site: str, wish: Wish) -> str:
    """A job template that extends the scheduler's by what was chosen for this site."""
    lines = [f'{{% extends "{scheduler.name}.sh" %}}']
    for block, directives in scheduler.blocks(wish).items():
        lines += [f"{{% block {block} %}}", *([directives] if directives else []), "{% endblock %}"]
    about = f"{{# {site}, as its scheduler described it to `crossfed quickstart` -#}}"
    if scheduler.name not in shipped_templates():
        raise InputError(f"there is no template for {scheduler.title}: write templates/{scheduler.name}.sh first")
    return "\n".join([about, *lines]) + "\n"


def _fill(dialog: Dialog, name: str, template: str, partition: str, account: str) -> dict[str, str]:
    known = {"partition": partition, "queue": partition, "account": account, "bank": account}
    result = {}
    for word in placeholders(template):
        if not (value := known.get(word, "")):
            question = Proposal(value="", why=f"template {template} needs it; the site's user guide says which")
            value = _word(dialog, f"{name}.{word}", question, must=True)
        result[word] = value
    return result


def _refused(make: Callable[..., object], *given: Any, **settings: str) -> str:
    """What federation.yml would say of these settings; empty where it takes them."""
    try:
        make(*given, **settings)
    except ConfigurationError as error:
        return error.message
    return ""


def _word(dialog: Dialog, question: str, proposal: Proposal, *, must: bool) -> str:
    def several(value: str) -> str:
        return "" if WORD.fullmatch(value) else f"{value!r}: expected one word of letters, digits and _.,:/@+=%-"

    return dialog.ask(question, proposal, must=must, refuse=several)


def _known(question: str, value: str, listed: Sequence[str]) -> None:
    """Warn of a value that the site does not list: it may hide some, so none is refused."""
    if listed and (unknown := [word for word in value.split(",") if word and word not in listed]):
        several = f"{', '.join(listed[:12])}{', ...' if len(listed) > 12 else ''}"
        log.warning("%s: the site does not list %s, but %s", question, ", ".join(unknown), several)


def _count(dialog: Dialog, question: str, proposed: int, why: str) -> int:
    def no_count(text: str) -> str:
        return "" if text.isdecimal() and int(text) <= 64 else f"{text!r}: expected a number from 0 to 64"

    return int(dialog.ask(question, Proposal(value=str(proposed), why=why), refuse=no_count))


def largest_batch(blocks: Sequence[int], wanted: int) -> int:
    """`wanted`, or the largest power of two that every facility's training blocks fill."""
    least = min(blocks, default=wanted)
    return wanted if least >= wanted else 1 << (max(1, least).bit_length() - 1)
