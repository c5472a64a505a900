"""Checks of a facility's environment, versions, dataset and free space, by one remote script (`facility.probe`)."""

from __future__ import annotations

import re
import shlex
import sys
import time
from dataclasses import replace

from coordinator.config.deployments import Deployment
from coordinator.config.federation import Facility
from coordinator.memory.figures import ModelFigures
from coordinator.preflight import gate
from coordinator.preflight.base_model import check_base_model
from coordinator.preflight.disk import Disk
from coordinator.preflight.probe_answer import (
    PROBE_SECONDS,
    DatasetAnswer,
    DiskAnswer,
    ProbeAnswer,
    answer_or_row,
)
from coordinator.preflight.remote import run_there
from coordinator.preflight.row import Row, fail, ok, warning
from coordinator.preflight.versions import check_versions
from facility.exchange.checkpoints.labels import classes_digest, default_labels
from facility.exchange.checkpoints.tokenizer import tokenizers_differ
from facility.exchange.files.paths import CHECKOUT
from facility.exchange.messages.job_template import enter_lines, path_word
from facility.exchange.messages.layout import QUANTIZES
from facility.exchange.messages.strict_json import clean_text
from facility.exchange.messages.trainer import TrainerSettings
from facility.exchange.requirements import meets_requirement
from facility.exchange.sizes import format_bytes

BEGIN = "crossfed-probe-begins"
FILES = 1000
"""Files that two rounds leave at a facility, amply counted."""


def probe_facility(
    deployment: Deployment,
    dataset: str,
    workdir: str,
    reserve: int,
    trainer: TrainerSettings | None = None,
    base: str = "",
) -> ProbeAnswer | Row:
    """The facility's answer, or a row (with an empty subject) that gives the reason for its absence."""
    words = ["-m", "facility.probe", "--dataset", dataset, "--workdir", workdir, "--reserve", str(reserve)]
    words += ["--trainer", trainer.module] if trainer and not trainer.built_in else []
    words += ["--base", base] if base else []
    arguments = shlex.join(words)
    if deployment.type == "local":
        script = f"cd {shlex.quote(str(CHECKOUT))} && echo {BEGIN} && {shlex.quote(sys.executable)} {arguments}\n"
    else:
        home = deployment.environment.home
        place = path_word(home)
        uses_home = not (deployment.environment.venv or deployment.environment.conda or deployment.environment.image)
        there = f"[ -f {place}/env.sh ] || {{ echo crossfed-no-env >&2; exit 66; }}\n" if uses_home else ""
        inside = f"apptainer exec {shlex.quote(deployment.environment.image)} " if deployment.environment.image else ""
        script = (
            f"{there}{enter_lines(deployment.environment)}\n"
            "python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || "
            "{ python3 --version >&2; echo crossfed-old-python >&2; exit 67; }\n"
            f"echo {BEGIN} $(date +%s)\n{inside}python3 {arguments}\n"
        )
    before = time.time()
    said = run_there(deployment, script, seconds=PROBE_SECONDS)
    text, after = said.out.partition(BEGIN)[2], time.time()
    if said.code or not text.strip():
        lines = clean_text(said.error, 4000, lines=True).strip().splitlines()
        return _unanswered(deployment, lines or [f"code {said.code}"])
    answer = answer_or_row(text)
    if isinstance(answer, Row):
        return answer
    return replace(answer, clock=clock_ahead(text.partition("\n")[0], before, after))


def clock_ahead(answered: str, before: float, after: float) -> float:
    """Seconds by which a clock is ahead at least, negative: behind; 0: it agrees as far as can be seen.

    `answered`: whole seconds since 1970, some time between `before` and `after` on the clock here.
    """
    if not re.fullmatch(r"[0-9]{1,12}", answered.strip()):
        return 0.0
    least, most = int(answered) - after, int(answered) + 1 - before
    return max(0.0, least) + min(0.0, most)


def _unanswered(deployment: Deployment, said: list[str]) -> Row:
    home = deployment.environment.home
    if any("crossfed-no-env" in line for line in said):
        return fail(
            "",
            "environment",
            f"{home}/env.sh does not exist at the facility",
            f"run `bash facility/setup.sh --home {home}` there, or set `environment: {{home: ...}}`",
        )
    if any("crossfed-old-python" in line for line in said):
        found = next((line for line in said if line.startswith("Python ")), "Python")
        return fail(
            "",
            "environment",
            f"the facility's {found} is too old, expected 3.11 or newer",
            "run facility/setup.sh again with --python or --module that gives a newer one",
        )
    if any("No module named 'facility" in line or "No module named facility" in line for line in said):
        return fail(
            "",
            "environment",
            "CrossFed cannot be imported at the facility, or is older than this one",
            "copy this checkout there and run facility/setup.sh again",
        )
    return fail(
        "",
        "environment",
        f"the facility's environment does not start: {said[-1]}",
        "log in there and try: . env.sh && python3 -m facility.probe --help",
    )


def check_site(
    facility: Facility,
    deployment: Deployment,
    model: ModelFigures | None,
    *,
    dataset: str,
    workdir: str,
    reserve: Disk,
    trainer: TrainerSettings | None,
    base: str,
) -> tuple[list[Row], ProbeAnswer | None]:
    """Rows on environment, versions, trainer, dataset, base model and room; and the answer itself.

    `reserve`: what its rounds need at most. `base`: the facility's `training.lora.base`, resolved where the facility is
    this machine.
    """
    if deployment.gate:
        answer = gate.probe_by_gate(deployment, dataset, reserve.bytes)
    else:
        answer = probe_facility(deployment, dataset, workdir, reserve.bytes, trainer, base)
    name = facility.name
    if isinstance(answer, Row):
        return [replace(answer, subject=name)], None
    rows = [
        *check_versions(name, answer),
        *_quantized(facility, answer),
        *_trainer(name, answer, trainer),
        *_dataset(facility, answer.dataset, dataset, model),
        *check_base_model(facility, answer.base_model),
        _room(name, answer.disk, workdir, reserve),
    ]
    return rows, answer


def _quantized(facility: Facility, answer: ProbeAnswer) -> list[Row]:
    """Whether the package that holds a base in 4 bits is installed; no row where none is asked for."""
    asked = facility.training.lora.quantize_base
    if asked == "none" or answer.optional is None:
        return []
    version = answer.optional.get("bitsandbytes")
    if version is None or not meets_requirement(version, QUANTIZES):
        has = "no bitsandbytes" if version is None else f"bitsandbytes {clean_text(str(version), 40)}"
        return [
            fail(
                facility.name,
                "bitsandbytes",
                f"training.lora.quantize_base is {asked}, and the facility has {has}, expected {QUANTIZES}",
                f"pip install '{QUANTIZES}' in the facility's environment, or set quantize_base to none for it",
            )
        ]
    return [ok(facility.name, "bitsandbytes", f"bitsandbytes {clean_text(str(version), 40)} is installed there")]


def _trainer(name: str, answer: ProbeAnswer, trainer: TrainerSettings | None) -> list[Row]:
    """Whether the federation's own trainer is installed; no row for CrossFed's, or where a gate's policy decides."""
    if trainer is None or answer.trainer is None:
        return []
    if problem := clean_text(answer.trainer, 200):
        return [
            fail(
                name,
                "trainer",
                f"{trainer.module} cannot be started at the facility: {problem}",
                "install it in the facility's environment, or correct `trainer:`",
            )
        ]
    return [ok(name, "trainer", f"{trainer.module} is installed there")]


def _dataset(facility: Facility, answer: DatasetAnswer, path: str, model: ModelFigures | None) -> list[Row]:
    name, prepare = facility.name, "prepare it there with `python -m facility.prepare` (or facility/setup.sh -- ...)"
    if answer.error == "missing":
        return [
            fail(
                name,
                "dataset",
                f"the dataset {path} does not exist at the facility",
                f"correct `dataset:`, or {prepare}",
            )
        ]
    if answer.error:
        return [fail(name, "dataset", f"the dataset is not usable: {answer.error}", prepare)]
    rows = [*_tokenizer(name, answer, model), *_classes(name, answer, model), *_blocks(facility, answer, model)]
    blocks = answer.blocks
    return rows or [
        ok(
            name,
            "dataset",
            f"{blocks['train']:,} training and {blocks['validation']:,} validation {_what(answer)}",
        )
    ]


def _what(answer: DatasetAnswer) -> str:
    """What the dataset counts, with its size."""
    if answer.image_size is not None:
        return f"images of {clean_text(answer.image_size, 40)}"
    return f"blocks of {answer.block_tokens} tokens"


def _classes(name: str, answer: DatasetAnswer, model: ModelFigures | None) -> list[Row]:
    """A row where the model's head does not have the dataset's classes in its order; a head without names takes any."""
    if not model or not answer.classes:
        return []
    labels, count = list(model.labels), answer.classes
    if count != len(labels):
        found = f"the dataset has {count} classes, the model's head has {len(labels)}"
    elif labels != default_labels(count) and answer.classes_sha256 not in (None, classes_digest(labels)):
        found = f"the dataset's classes are not the model's, or in another order; its head names {_some(labels)}"
    elif model.problem:
        found = (
            f"the model's problem_type is {clean_text(model.problem, 100)}, the dataset has one class for each example"
        )
    else:
        return []
    fix = "prepare the dataset with --classes in the model's order, or make the model with these (crossfed model)"
    return [fail(name, "classes", found, fix)]


def _some(names: list[str]) -> str:
    return clean_text(", ".join(names[:10]), 200) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _tokenizer(name: str, answer: DatasetAnswer, model: ModelFigures | None) -> list[Row]:
    """A row where the dataset was not tokenised, or its images not sized and scaled, as the model expects."""
    if model and model.vocabulary and answer.vocabulary_size > model.vocabulary:
        found = (
            f"the dataset was tokenised with {answer.vocabulary_size} tokens, the model has {model.vocabulary}: "
            "another tokenizer"
        )
    elif model and tokenizers_differ(answer.image_processor_sha256, model.image_processor):
        found = (
            f"the images were made by {clean_text(str(answer.image_processor_sha256), 100)}, the model carries "
            f"{model.image_processor}: another image processor"
        )
        fix = "prepare the dataset with the model's own preprocessor_config.json"
        return [fail(name, "image processor", found, fix)]
    elif model and tokenizers_differ(answer.tokenizer_sha256, model.tokenizer):
        found = (
            f"the dataset was tokenised with {answer.tokenizer_sha256}, the model carries {model.tokenizer}: "
            "another tokenizer of the same size"
        )
    else:
        return []
    return [fail(name, "tokenizer", found, "prepare the dataset with the model's own tokenizer")]


def _blocks(facility: Facility, answer: DatasetAnswer, model: ModelFigures | None) -> list[Row]:
    """A row for blocks too long for the model, and for too few of them for a batch or for validation."""
    blocks, batch = answer.blocks, facility.training.batch_sequences
    rows = []
    if model and model.positions and answer.block_tokens > model.positions:
        rows.append(
            (
                f"blocks have {answer.block_tokens} tokens, the model takes at most {model.positions} positions",
                f"prepare with --block-tokens {model.positions} or less",
            )
        )
    if blocks.get("train", 0) < batch:
        rows.append(
            (
                f"{blocks.get('train', 0)} training blocks are fewer than one batch of {batch}",
                "prepare more text or shorter blocks, or lower `batch_sequences`",
            )
        )
    if not blocks.get("validation"):
        rows.append(
            (
                "there is no validation block, so no validation loss can be computed",
                "prepare with --validation or a larger --validation-share",
            )
        )
    return [fail(facility.name, "dataset", found, fix) for found, fix in rows]


def _room(name: str, answer: DiskAnswer, workdir: str, need: Disk) -> Row:
    if not answer.writable:
        return fail(
            name,
            "room",
            f"{workdir} cannot be written to",
            "correct `workdir:`, or make the directory and give it to your account",
        )
    if answer.shared is not None:
        found = f"{answer.shared}, so that others could exchange what its jobs are given"
        return fail(name, "workdir", found, "choose another `workdir:`, which a run then makes for your account alone")
    if answer.free < need.bytes:
        return fail(
            name,
            "room",
            f"{format_bytes(answer.free)} are free at {workdir}, the rounds need {need}",
            "free some, or choose a larger file system for `workdir:`",
        )
    for quota in answer.quotas:
        if quota.free is not None and quota.free < need.bytes:
            return fail(
                name,
                "room",
                f"the quota of {quota.of} leaves {format_bytes(quota.free)}, the rounds need {need} at {workdir}",
                "free some, ask the site for more, or choose another file system for `workdir:`",
            )
        if quota.files_free is not None and quota.files_free < FILES:
            return fail(
                name,
                "room",
                f"the quota of {quota.of} leaves {quota.files_free} files, the rounds need up to {FILES}",
                "remove files there (a Python environment has tens of thousands), or ask the site for more",
            )
    if answer.refused is not None:
        return fail(
            name,
            "room",
            f"{format_bytes(need.bytes)} could not be reserved at {workdir}: {answer.refused}",
            "your quota there is smaller than the free space; ask for more or choose another `workdir:`",
        )
    if answer.above is not None:
        found = f"every account of the host may write {answer.above}, and exchange what lies there, {workdir} too"
        return warning(
            name, "workdir", found, "choose another `workdir:`, or have `chmod o-w` or `chmod +t` done there"
        )
    return ok(name, "room", f"{format_bytes(answer.free)} free at {workdir}, the rounds need {need}")
