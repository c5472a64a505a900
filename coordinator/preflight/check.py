"""`crossfed check`: all checks possible before a node-hour is spent. Only `--submit` submits a job."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from coordinator.archive.many import group_for_display, kind_of, names_of, too_many_to_list
from coordinator.certificates import certificate_lifetime
from coordinator.config.deployments import QUEUES, job_template
from coordinator.config.federation import Facility, Federation, read_federation
from coordinator.config.firecrest import FIRECREST
from coordinator.config.settings import ClaimSettings
from coordinator.console import on_stderr, reported_meanwhile
from coordinator.engine.render import render
from coordinator.memory.figures import ModelFigures
from coordinator.preflight.ahead import check_ahead
from coordinator.preflight.alike import others_than_most
from coordinator.preflight.archive import check_archive
from coordinator.preflight.base_model import check_same_base
from coordinator.preflight.chat_template import check_chat_template
from coordinator.preflight.comparison import check_comparison
from coordinator.preflight.coordinator import check_here
from coordinator.preflight.cost import check_hours, check_link, check_memory
from coordinator.preflight.disk import Disk, facility_disk
from coordinator.preflight.elastic import check_clock, check_elastic, check_elastic_steps, outlook_if_elastic
from coordinator.preflight.evaluators import check_own_evaluators, check_tasks
from coordinator.preflight.facility import check_site
from coordinator.preflight.firecrest import check_firecrest
from coordinator.preflight.fitting import check_fitting, shared_tokens
from coordinator.preflight.gate import check_gate
from coordinator.preflight.last_check import remember_failures
from coordinator.preflight.privacy import check_differential_privacy, check_secure_aggregation
from coordinator.preflight.probe_answer import DatasetAnswer, ProbeAnswer
from coordinator.preflight.remote import check_connection
from coordinator.preflight.row import Row, fail, ok, skipped, warning
from coordinator.preflight.scheduler import check_scheduler, wanted_hours
from coordinator.preflight.secret_files import check_secret_files
from coordinator.preflight.sparse_updates import check_sparse_updates
from coordinator.preflight.stages import check_stages
from coordinator.preflight.waiting import check_waiting
from coordinator.steps.outlook import Outlook
from facility.exchange.errors import ConfigurationError, CrossFedError
from facility.exchange.grid import check_ranks_of_plan, check_work_of_plan
from facility.exchange.messages.manifest import sha256_of
from facility.exchange.messages.plan import read_plan
from facility.exchange.messages.strict_json import clean_text
from facility.exchange.text import number_of

Answer = TypeVar("Answer")


def check(
    file: Path, *, link: bool = True, submit: bool = False, progress: Callable[[str], None] = lambda text: None
) -> list[Row]:
    """All rows, the facilities' asked side by side. `link`: measure the links (16 MB each).

    `submit`: a job of one second where the scheduler has no dry run. `progress` is given a sentence now and then while
    facilities have not answered.
    """
    found = _readable(file)
    return [found] if isinstance(found, Row) else _check(found, link=link, submit=submit, progress=progress)


def check_for_run(file: Path, *, link: bool, submit: bool = False) -> list[Row]:
    """All rows, as a command finds them: progress goes to stderr, and what fails is kept for `crossfed run`."""
    found = _readable(file)
    if isinstance(found, Row):
        return [found]
    digest = sha256_of(file)  # the file may be edited while facilities answer
    rows = _check(found, link=link, submit=submit, progress=on_stderr)
    remember_failures(found, digest, rows)
    return rows


def _readable(file: Path) -> Federation | Row:
    """The federation, if it can be rendered; else the row that says why not."""
    try:
        federation = read_federation(file)
        render(federation)
    except ConfigurationError as error:
        return fail(
            "federation", "federation.yml", str(error), "fix that file" if error.line is None else "fix that line"
        )
    return federation


def _check(federation: Federation, *, link: bool, submit: bool, progress: Callable[[str], None]) -> list[Row]:
    """As `check`, of a federation that was read."""
    facilities = number_of(len(federation.facilities), "facility", "facilities")
    rows = [ok("federation", "federation.yml", f"{facilities}, {number_of(federation.rounds, 'round')}")]
    rows.append(ok("federation", "aggregation", federation.chosen))
    rows += check_secure_aggregation(federation)
    rows += check_sparse_updates(federation)
    if federation.deprecated:
        rows.append(warning("federation", "deprecated", federation.deprecated, "change federation.yml"))
    rows += check_waiting(federation) + check_secret_files(federation)
    try:
        ahead = outlook_if_elastic(federation)
    except CrossFedError as error:
        return [*rows, fail("federation", "archive", str(error), "correct what is named, or `crossfed rewind`")]
    rows += check_elastic(federation, ahead)
    here, model = check_here(federation)
    here += check_own_evaluators(federation)
    with ThreadPoolExecutor(max_workers=16) as pool, ThreadPoolExecutor(max_workers=1) as beside:
        archive = beside.submit(check_archive, federation)
        found = answers(
            {
                one.name: pool.submit(check_facility, federation, one, model, link=link, submit=submit, elastic=ahead)
                for one in federation.facilities
            },
            progress,
        )
        with reported_meanwhile(
            lambda: "the facilities have answered; what the archive holds is being verified", progress
        ):
            archived = archive.result()
    answered = {one.name: answer for one, (_, answer) in zip(federation.facilities, found, strict=True)}
    datasets = {name: answer.dataset for name, answer in answered.items() if answer is not None}
    unstated = [one.name for one in federation.facilities if not one.training.lora.base_sha256]
    same = check_same_base({name: one.base_model for name in unstated if (one := answered[name]) is not None})
    if model is not None:
        shared = {name: shared_tokens(one.task, one.separate, one.block_tokens) for name, one in datasets.items()}
        with reported_meanwhile(
            lambda: "the facilities have answered; what the trainer makes of the model is being looked at", progress
        ):
            here += check_fitting(federation, {name: answer.task for name, answer in datasets.items()}, shared)
            if not any(row.check == "layout" for row in here):
                here += check_stages(federation, datasets, model)
    here += archived
    here += check_chat_template(federation.path(federation.model), datasets)
    alike = check_alike(datasets) + check_claims(federation.claims, datasets)
    return [*rows, *here, *(row for rows_of_site, _ in found for row in rows_of_site), *alike, *same]


def answers(asked: Mapping[str, Future[Answer]], progress: Callable[[str], None]) -> list[Answer]:
    """What was asked of each facility, once all have answered."""

    def missing() -> str:
        names = [name for name, one in asked.items() if not one.done()]
        answered = f"{len(asked) - len(names)} of {number_of(len(asked), 'facility', 'facilities')} answered"
        return f"{answered}, waiting for {names_of(names)}" if names else ""

    with reported_meanwhile(missing, progress):
        return [one.result() for one in asked.values()]


ALIKE = (
    ("task", "task"),
    ("chat_template_sha256", "chat template"),
    ("image_size", "image size"),
    ("image_processor_sha256", "image processor"),
    ("classes_sha256", "classes"),
)
"""What a probe says of a dataset that all facilities must have alike, and what to call it."""


def check_alike(datasets: Mapping[str, DatasetAnswer]) -> list[Row]:
    """Facilities whose conversations were put into words otherwise than most others' train another model than theirs,
    and so do those whose images have another size or whose classes another order.

    `datasets`: what each facility's probe said of its dataset.
    """
    rows = []
    for key, subject in ALIKE:
        told = {name: getattr(answer, key) for name, answer in datasets.items()}
        values = {name: clean_text(value, 80) for name, value in told.items() if value is not None}
        for name, others in others_than_most(values).items():
            rows.append(
                fail(
                    name,
                    "dataset",
                    f"its dataset has the {subject} {values[name] or 'none'}, {others}",
                    f"prepare the datasets of all facilities with the same {subject}"
                    + (" (--classes)" if subject == "classes" else ""),
                )
            )
    return rows


def check_claims(claims: ClaimSettings, datasets: Mapping[str, DatasetAnswer]) -> list[Row]:
    """Facilities whose blocks are longer than `claims.sequence_tokens` says would claim too much in every round.

    `datasets`: as for `check_alike`.
    """
    longest = claims.sequence_tokens if claims.action != "off" else 0
    return [
        fail(
            name,
            "claims",
            f"its blocks have {answer.block_tokens} tokens, claims.sequence_tokens allows {longest}: no update of "
            "it would count as it is",
            f"set claims.sequence_tokens to {answer.block_tokens} or more, or to 0",
        )
        for name, answer in datasets.items()
        if longest and answer.block_tokens > longest
    ]


def check_facility(
    federation: Federation,
    facility: Facility,
    model: ModelFigures | None,
    *,
    link: bool,
    submit: bool = False,
    elastic: Outlook | None = None,
) -> tuple[list[Row], ProbeAnswer | None]:
    """Rows of one facility, and what its probe answered, if it did."""
    deployment = facility.deployment
    template = job_template(deployment, federation.file.parent) or ""
    hours = wanted_hours(deployment, template)
    ahead = None if deployment.gate else check_ahead(federation, facility, hours)
    early = [row for row in (ahead, check_elastic_steps(elastic, facility.name, hours)) if row is not None]
    if deployment.type == FIRECREST:
        return [*check_firecrest(facility, template, submit=submit), *early], None
    certificates = certificate_rows(facility, hours)
    reached = (
        check_gate(federation, facility, link=link)
        if deployment.gate
        else [check_connection(facility.name, deployment)]
    )
    if reached[0].verdict != "ok":
        unseen = skipped(facility.name, "everything else", "the facility cannot be reached")
        return [*reached, *certificates, unseen], None
    rows = [*reached, *certificates, *early]
    local = deployment.type == "local"
    dataset = str(federation.path(facility.dataset)) if local else facility.dataset
    workdir = deployment.workdir or str(federation.workdir_path / facility.name)
    trainer = federation.trainer_of(facility)
    base = facility.training.lora.base
    base = str(federation.path(base)) if local and base else base
    need = disk_of(federation, facility, model) if model is not None else Disk(parts={})
    rows_of_site, answer = check_site(
        facility, deployment, model, dataset=dataset, workdir=workdir, reserve=need, trainer=trainer, base=base
    )
    rows += rows_of_site
    if answer is not None:
        rows += check_tasks(federation, facility.name, answer.optional)
        rows += check_clock(elastic, facility.name, answer.clock)
        rows += check_differential_privacy(federation, facility, answer.dataset)
    if deployment.type in QUEUES and not deployment.gate:
        rows += check_scheduler(facility.name, deployment, template, submit=submit)
        rows.append(check_hours(federation, facility, deployment, template))
    if (compared := check_comparison(federation, facility, deployment, model, template)) is not None:
        rows.append(compared)
    if model is not None:
        block = (answer.dataset.block_tokens if answer is not None else 0) or model.positions or 1024
        rows.append(memory_row(federation, facility, model, block, template))
        if link and not deployment.gate:
            rows.append(link_row(federation, facility, model))
    return rows, answer


def link_row(federation: Federation, facility: Facility, model: ModelFigures) -> Row:
    """How fast the link is, and how long a round's models take over it."""
    return check_link(
        facility,
        facility.deployment,
        model,
        federation.sending,
        federated=federation.aggregation.federated,
        masked_bits=federation.masked_bits,
        changed=changed_by_all(federation, model),
    )


def certificate_rows(facility: Facility, hours: float) -> list[Row]:
    """Whether the login's certificate lives as long as a job, where the login has one."""
    one = certificate_lifetime(facility.name, facility.deployment, hours)
    if one is None:
        return []
    return [Row(subject=facility.name, check="certificate", verdict=one.verdict, found=one.found, fix=one.fix)]


def disk_of(federation: Federation, facility: Facility, model: ModelFigures) -> Disk:
    """What the facility needs at most."""
    return facility_disk(
        model,
        facility.training,
        federation.sending.encoding,
        federated=federation.aggregation.federated,
        masked_bits=federation.masked_bits,
        changed=changed_by_all(federation, model),
    )


def changed_by_all(federation: Federation, model: ModelFigures) -> int:
    """Values of the model that a round changes."""
    trainings = [*federation.training_of.values()]
    return model.changed(*trainings, federated=federation.aggregation.federated)


def memory_row(
    federation: Federation, facility: Facility, model: ModelFigures, block_tokens: int, template: str
) -> Row:
    """`check_memory`, by the facility's plan where that is a file on this machine."""
    plan = None
    if (named := facility.training.layout.plan) and facility.deployment.type == "local":
        try:
            plan = read_plan(federation.path(named))
            check_ranks_of_plan(plan, facility.training.ranks, facility.training.layout.shards or 1)
            check_work_of_plan(plan, facility.training)
        except ConfigurationError as error:
            return fail(facility.name, "memory", str(error), "make the plan by `crossfed plan`")
    private = federation.privacy is not None and federation.privacy.differential is not None
    return check_memory(facility, facility.deployment, model, block_tokens, template, plan, private=private)


def to_show(rows: list[Row]) -> list[Row]:
    """All rows of few subjects; of many, one for all facilities that pass a check, and one for all that need the
    same."""
    if not too_many_to_list({row.subject for row in rows}):
        return rows
    alone = [row for row in rows if row.subject in ("federation", "coordinator")]
    others = [row for row in rows if row.subject not in ("federation", "coordinator")]
    groups = sorted(group_for_display(others, _what_was_found), key=lambda group: others.index(group[0]))
    return [*alone, *map(_one_of, groups)]


def _what_was_found(row: Row) -> tuple[str, ...]:
    if row.verdict == "ok":
        return row.check, row.verdict
    return row.check, row.verdict, kind_of(row.found, row.subject), kind_of(row.fix, row.subject)


def _one_of(group: list[Row]) -> Row:
    """The first row, for the subjects of all."""
    first, names = group[0], list(dict.fromkeys(row.subject for row in group))
    if len(names) == 1:
        return first
    subject = f"{len(names)} facilities" + (f": {names_of(names)}" if first.verdict != "ok" else "")
    return replace(first, subject=subject, found=f"{first.subject}: {first.found}")


def show_rows(
    rows: list[Row], *, as_json: bool, write: Callable[[str], None] = print, console: Console | None = None
) -> int:
    """Print the rows; 1 when one of them fails."""
    failing = sum(row.verdict == "fail" for row in rows)
    if as_json:
        write(json.dumps({"failing": failing, "rows": [asdict(row) for row in rows]}, indent=2, ensure_ascii=False))
        return int(failing > 0)
    console = console or Console(emoji=False)
    table = Table(show_lines=False)
    for name in ("subject", "check", "", "found"):
        table.add_column(name, overflow="fold")
    colours = {"ok": "green", "warning": "yellow", "fail": "red", "skipped": "dim"}
    for row in to_show(rows):
        found = row.found + (f"\n-> {row.fix}" if row.fix else "")
        table.add_row(
            row.subject,
            row.check,
            f"[{colours[row.verdict]}]{row.verdict}[/]",
            escape(clean_text(found, 4000, lines=True)),
        )
    console.print(table)
    console.print(f"{failing} to fix before a job is submitted" if failing else "all checks passed")
    return int(failing > 0)
