"""`crossfed quickstart`, from first to last: log in, ask, describe, send, set up, check. The same command goes on."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from coordinator.config import facility_names
from coordinator.config.deployments import HOST, USER, Deployment
from coordinator.config.federation import Facility, Federation, read_federation
from coordinator.config.schema import NAME, write_schema
from coordinator.demo import make_demo
from coordinator.memory.figures import model_figures
from coordinator.model import check_source, convert_model
from coordinator.preflight.gate_answer import GateSummary
from coordinator.preflight.remote import check_connection, login_error
from coordinator.quickstart.choice import Choice, choose, choose_local
from coordinator.quickstart.describe import RoundTraining, federation_text
from coordinator.quickstart.dialog import Dialog
from coordinator.quickstart.equip import equip, fit_batch
from coordinator.quickstart.gated import ask_gate, choose_gated
from coordinator.quickstart.host_keys import trust
from coordinator.quickstart.propose import Proposal
from coordinator.quickstart.survey import Survey, ask_site
from coordinator.share import share_tokenizer
from facility.exchange.errors import ConfigurationError, InputError, TransientError
from facility.exchange.exit_codes import ExitCode
from facility.exchange.files import present
from facility.exchange.files.durable import make_parents, write_text
from facility.exchange.text import NAME as FACILITY_NAME
from facility.exchange.text import NAME_WORDS, number_of

log = logging.getLogger(__name__)

LOGIN = re.compile(rf"(?:({USER.pattern})@)?((?:{HOST.pattern}))")
DEMO = "demo"
MODEL = "model"
SET_UP = "set-up"
"""The last question."""
KEY = "~/.ssh/id_ed25519"
BLOCK = 1024
"""Tokens of a block, unless the model takes fewer."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the command line says."""

    folder: Path
    name: str
    facilities: Mapping[str, str]
    """`[user@]host[:port]` or `local` by name; empty: asked for."""
    model: str
    """Hub name, folder of a checkpoint, or `demo`; empty: asked for."""
    data: Mapping[str, str]
    """Text, or a prepared dataset, at each facility."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Private ssh key by facility; that of '' is for those that are not named."""
    known_hosts: str = ""
    plan: RoundTraining
    block_tokens: int = 0
    """0: what the model takes, at most 1024."""
    prepare: tuple[str, ...] = ()
    """Further arguments of facility.prepare."""
    set_up: bool = True


def federation_file(folder: Path) -> Path:
    """Where the file of a federation in `folder` is."""
    return folder / "workflow" / "federation.yml"


def begin(request: Request, dialog: Dialog) -> Path:
    """Write federation.yml and set the facilities up; returns its path. Raises `InputError`, `TransientError`.

    What an earlier run of the same command did is recognised at every step.
    """
    if os.path.lexists(request.folder) and not request.folder.is_dir():
        raise InputError(f"{request.folder} is not a folder, expected one to make, or that of a federation")
    file = federation_file(request.folder)
    texts, surveys = dict(request.data), {}
    if file.exists():
        log.info("%s exists: going on with it; what it says holds, whatever the command says of the same", file)
        federation = read_federation(file)
        check_names(request, federation.names, f"; they are those of {file}: edit it")
        behind = _connect_all(dialog, {facility.name: facility.deployment for facility in federation.facilities})
        for facility in federation.facilities:
            if _is_dataset(federation, facility, texts.get(facility.name, "")):
                texts[facility.name] = ""
            if facility.name in behind and behind[facility.name] is None:
                surveys[facility.name] = ask_site(facility.name, facility.deployment, facility.dataset)
    else:
        if not FACILITY_NAME.fullmatch(request.name):
            raise InputError(f"--name {request.name!r}: {NAME_WORDS}")
        if request.model and request.model != DEMO:
            check_source(request.model)
        choices, behind = [], {}
        logins = request.facilities or _ask_facilities(dialog, request, behind)
        check_names(request, list(logins), "")
        _check_logins(request, logins)
        deployments = {name: read_login(name, login, request) for name, login in logins.items()}
        behind |= _connect_all(dialog, {name: one for name, one in deployments.items() if name not in behind})
        for name, deployment in deployments.items():
            choice, survey = _facility(request, dialog, name, deployment, behind.get(name))
            choices.append(choice)
            texts[name] = "" if choice.prepared else choice.data
            if survey is not None:
                surveys[name] = survey
        signing_key = _signing_key(request, dialog) if any(choice.gated for choice in choices) else ""
        dialog.check_given(later=(SET_UP, *([] if request.model else [MODEL])))  # before a model is downloaded
        model = _model(request, request.model) if request.model else _ask_model(request, dialog)
        _write(file, request, model, choices, signing_key)
        log.info("%s is written", file)
        federation = read_federation(file)
    if request.set_up and dialog.agrees(SET_UP, "send the tokenizer, set each facility up, prepare its data there"):
        _set_up(federation, request, texts, surveys)
    return file


def check_names(request: Request, names: Sequence[str], whose: str) -> None:
    """Raise `InputError` for an option that names another facility than these. `whose`: words after the names."""
    named = {"--facility": request.facilities, "--data": request.data, "--key": request.keys}
    for option, given in named.items():
        if unknown := [name for name in given if name and name not in names]:
            raise InputError(f"{option} {unknown[0]}=...: the facilities are {', '.join(names)}{whose}")


def _check_logins(request: Request, logins: Mapping[str, str]) -> None:
    """Raise `InputError`, before a site is asked, for no login and for names that federation.yml would refuse."""
    local = [name for name, login in logins.items() if not read_login(name, login, request).host]
    try:
        facility_names.check_names(list(logins), local)
    except ConfigurationError as error:
        raise InputError(f"--facility: {error.message}") from None


def _is_dataset(federation: Federation, facility: Facility, data: str) -> bool:
    """Whether the command line names the facility's dataset itself, which was prepared before: no text to prepare."""
    if facility.deployment.host:
        return data == facility.dataset
    return bool(data) and Path(data).expanduser().resolve() == federation.path(facility.dataset)


def _ask_facilities(dialog: Dialog, request: Request, behind: dict[str, GateSummary | None]) -> dict[str, str]:
    """Logins by name, each tried before the next is asked for. `behind`: takes what `_connect` found of each."""
    found: dict[str, str] = {}
    while True:
        question = f"facility-{len(found) + 1}"
        why = "NAME=[USER@]HOST[:PORT], or NAME=local; empty: no more"
        no_login = partial(_no_login, request, dialog, found, behind)
        answer = dialog.ask(question, Proposal(value="", why=why), must=not found, refuse=no_login)
        if not answer:
            return found
        name, _, login = answer.partition("=")
        found[name.strip()] = login.strip()


def _no_login(
    request: Request, dialog: Dialog, found: Mapping[str, str], behind: dict[str, GateSummary | None], answer: str
) -> str:
    """Why no facility is added to those `found` by this answer, such as a login that fails; empty where one is."""
    name, _, login = (word.strip() for word in answer.partition("="))
    if not name or not login:
        return f"{answer}: expected NAME=[USER@]HOST[:PORT], or NAME=local"
    if name in found:
        return f"{name} is there already, as {found[name]}; give this one another name"
    try:
        _check_logins(request, {**found, name: login})
        if (deployment := read_login(name, login, request)).host:
            behind[name] = _connect(dialog, name, deployment, then="answer again")
    except (InputError, TransientError) as error:
        return str(error)
    return ""


def read_login(name: str, text: str, request: Request) -> Deployment:
    """Raises `InputError` for a name or login that is none."""
    if not FACILITY_NAME.fullmatch(name):
        raise InputError(f"facility name {name!r}: {NAME_WORDS}")
    if text == "local":
        return Deployment()
    if not (found := LOGIN.fullmatch(text)):
        raise InputError(f"{name}={text}: expected {name}=[USER@]HOST[:PORT], or {name}=local")
    return Deployment(
        type="ssh",
        host=found[2],
        user=found[1] or "",
        key=request.keys.get(name, request.keys.get("", "")),
        known_hosts=request.known_hosts,
        workdir="/tmp",  # nothing is put there: a deployment wants one
    )


def _facility(
    request: Request, dialog: Dialog, name: str, login: Deployment, behind: GateSummary | None
) -> tuple[Choice, Survey | None]:
    if behind is not None:
        log.info("%s: %s", name, behind.describe())
        return choose_gated(dialog, name, login, behind, request.data.get(name, ""), request.name), None
    if not login.host:
        path = Path(_data(request, dialog, name, "here", _not_here)).expanduser().resolve()
        prepared = present.is_file(path / "dataset.json")
        return choose_local(name, str(path), prepared=prepared, folder=str(request.folder.resolve())), None
    surveys: list[Survey] = []

    def not_there(data: str) -> str:
        surveys.append(ask_site(name, login, data))
        if surveys[-1].data == "prepared" and not data.startswith(("/", "~/")):
            return f"{data} is a prepared dataset there, expected its absolute path, or one that begins with ~/"
        return f"{data} does not exist there or cannot be read" if surveys[-1].data == "missing" else ""

    data = _data(request, dialog, name, "there", not_there)
    log.info("%s: %s", name, _describe_survey(surveys[-1]))
    return choose(dialog, name, login, surveys[-1], data), surveys[-1]


def _data(request: Request, dialog: Dialog, name: str, where: str, refuse: Callable[[str], str]) -> str:
    """The facility's data, as given or asked for. Raises `InputError` for given ones that `refuse` says no to."""
    if not (given := request.data.get(name, "")):
        why = f"path of the text {where} (a file or folder), or of a prepared dataset"
        return dialog.ask(f"{name}.data", Proposal(value="", why=why), refuse=refuse)
    if reason := refuse(given):
        raise InputError(f"{name}: {reason}; correct --data {name}=PATH")
    return given


def _not_here(data: str) -> str:
    path = Path(data).expanduser().resolve()
    return "" if present.exists(path) else f"{path} does not exist"


def _describe_survey(survey: Survey) -> str:
    queue = survey.scheduler.title if survey.scheduler else "no scheduler"
    pythons = ", ".join(f"{one.command} {one.version[0]}.{one.version[1]}" for one in survey.pythons[:2]) or "no Python"
    network = "internet" if survey.internet else "no internet"
    partitions, accounts = number_of(len(survey.partitions), "partition"), number_of(len(survey.accounts), "account")
    return f"{queue}, {partitions}, {accounts}, {pythons}, {network}"


def _connect_all(dialog: Dialog, logins: Mapping[str, Deployment]) -> dict[str, GateSummary | None]:
    """What `_connect` finds of each that is on another host. Where several fail, all are said before it raises."""
    found: dict[str, GateSummary | None] = {}
    failed: list[InputError | TransientError] = []
    for name, login in logins.items():
        try:
            if login.host:
                found[name] = _connect(dialog, name, login)
        except (InputError, TransientError) as error:
            failed.append(error)
    failed.sort(key=lambda one: isinstance(one, InputError))  # it is the last that says how the command ends
    for one in failed[:-1]:
        log.error("%s", one)
    if failed:
        raise failed[-1]
    return found


def _connect(
    dialog: Dialog, name: str, login: Deployment, then: str = "give the same command again"
) -> GateSummary | None:
    """Test the login; returns a gate's summary of its policy, None for a shell. Raises `InputError`, `TransientError`.

    An unknown host key is accepted only by its fingerprint.
    """
    row = check_connection(name, login)
    if row.check == "host key" and "not in known_hosts" in row.found and trust(dialog, name, login):
        row = check_connection(name, login)
    if row.verdict == "ok":
        return None
    if row.check == "gate" and (found := ask_gate(login)) is not None:
        return found
    advice = row.fix if row.fix.endswith("?") else f"{row.fix};"
    raise login_error(row, f"{name}: {row.found}; {advice} then {then}")


def _signing_key(request: Request, dialog: Dialog) -> str:
    """The private key that signs the models. Raises `InputError` for one that does not exist."""
    why = "private ssh key that signs the models: a gate lets only signed ones be trained, and its site has the .pub"

    def no_key(path: str) -> str:
        if Path(path).expanduser().is_file():
            return ""
        return f"the signing key {path} does not exist: ssh-keygen -t ed25519 -f {path}; give its .pub out"

    return dialog.ask("signing-key", Proposal(value=request.keys.get("", KEY), why=why), refuse=no_key)


def _ask_model(request: Request, dialog: Dialog) -> Path:
    """The federation's model, made of the one that is asked for."""
    made: list[Path] = []

    def no_model(source: str) -> str:
        try:
            made.append(_model(request, source))
        except InputError as error:
            return str(error)
        except TransientError as error:  # the hub does not answer, or the name is not one that it has
            if dialog.yes or MODEL in dialog.given:
                raise
            return str(error)
        return ""

    why = f"hub name (ORG/NAME), folder of a checkpoint, or {DEMO!r} for a small one"
    dialog.ask(MODEL, Proposal(value="", why=why), refuse=no_model)
    return made[-1]


def _model(request: Request, source: str) -> Path:
    out = request.folder.resolve() / "model"
    if source == DEMO:
        material = request.folder.resolve() / ".demo"
        make_demo(material, datasets=False, progress=log.info)
        source = str(material / "model")
    log.info("%s", convert_model(source, out, dtype="bfloat16", revision="main"))
    return out


def _write(file: Path, request: Request, model: Path, choices: list[Choice], signing_key: str) -> None:
    make_parents(file)
    for choice in choices:
        if choice.template_text:
            write_text(file.with_name(choice.template), choice.template_text)
    write_schema(file.with_name(NAME))
    write_text(file, federation_text(request.name, f"../{model.name}", request.plan, choices, signing_key))


def _set_up(
    federation: Federation,
    request: Request,
    texts: Mapping[str, str],
    surveys: Mapping[str, Survey],
) -> None:
    for one in share_tokenizer(federation, weights=False):
        sent = "sent" if one.sent else "there"
        log.info("%s: tokenizer %s: %s, digest %s", one.facility, sent, one.path, one.digest[:16])
    positions = model_figures(federation.path(federation.model)).positions
    blocks = []
    for facility in federation.facilities:
        size = request.block_tokens or min(BLOCK, positions or BLOCK)
        text, survey = texts.get(facility.name, ""), surveys.get(facility.name)
        try:
            blocks.append(equip(federation, facility, survey, text, size, request.prepare, request.folder))
        except subprocess.CalledProcessError as error:
            said = (
                f"{facility.name}: facility.prepare ended with code {error.returncode}, see above; an option of its "
                "own that would help goes into --prepare, such as --prepare '--allow-overlap'"
            )
            raise (InputError(said) if error.returncode == ExitCode.INPUT else TransientError(said)) from None
    if (fitted := fit_batch(federation.file, blocks, request.plan.batch_sequences)) is not None:
        log.info("%s", fitted)
