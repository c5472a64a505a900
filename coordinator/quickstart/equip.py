"""Set a facility up over the connection it was asked by: packages or a bundle, self-check, its data prepared."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from coordinator.bundle import COMPLETE, make_bundle
from coordinator.config.deployments import job_template
from coordinator.config.federation import Facility, Federation
from coordinator.preflight.facility import probe_facility
from coordinator.preflight.row import Row
from coordinator.quickstart.choice import largest_batch
from coordinator.quickstart.gated import blocks_behind
from coordinator.quickstart.propose import install, python_version
from coordinator.quickstart.survey import Survey
from coordinator.remote_setup import set_up
from coordinator.schedulers.directives import gpus_asked
from coordinator.share import FOLDER
from facility.exchange.errors import InputError
from facility.exchange.files.durable import write_text
from facility.exchange.text import number_of

log = logging.getLogger(__name__)

KNOWN_DIRECTIVES = ("slurm", "pbs")
"""Schedulers whose templates say whether they ask for GPUs in words that `gpus_asked` knows."""
BATCH = re.compile(r"^  batch_sequences: (\d+).*$", re.MULTILINE)


def prepare_here(words: Sequence[str]) -> None:
    """Run `facility.prepare`, and no module of the current folder. Raises `CalledProcessError` where it fails."""
    subprocess.run([sys.executable, "-P", "-m", "facility.prepare", *words], check=True)


def equip(
    federation: Federation,
    facility: Facility,
    survey: Survey | None,
    text: str,
    block_tokens: int,
    further: Sequence[str],
    folder: Path,
) -> int:
    """Set it up and prepare `text` there, '' where its dataset exists; returns its training blocks.

    `survey`: None for a facility on this machine. Raises `InputError`, `TransientError`, or `CalledProcessError` from a
    preparation here.
    """
    if facility.deployment.gate:
        return blocks_behind(facility)
    local = survey is None
    where = federation.path(federation.model) if local else f"{facility.deployment.environment.home}/{FOLDER}"
    dataset = str(federation.path(facility.dataset)) if local else facility.dataset
    words = ["--input", text, "--tokenizer", str(where), "--out", dataset]
    words += ["--block-tokens", str(block_tokens), *further]
    if survey is None:
        if text:
            log.info("%s: preparing %s here", facility.name, text)
            prepare_here(words)
    else:
        method = install(survey)
        if not method.arguments:
            raise InputError(f"{facility.name}: {method.why}")
        log.info("%s: setting up: %s", facility.name, method.why)
        torch = torch_for(federation, facility, survey)
        sent = _bundle(survey, folder, torch) if method.bundle else None
        chosen = ["--torch", torch] if torch == "cpu" and not sent and "--as-is" not in method.arguments else []
        arguments = [*method.arguments, *chosen, *(["--", *words] if text else [])]
        set_up(federation, facility.name, bundle=sent, arguments=arguments)
    answer = probe_facility(facility.deployment, dataset, facility.deployment.workdir or "/tmp", 0)
    if isinstance(answer, Row) or answer.dataset.error:
        reason = answer.found if isinstance(answer, Row) else answer.dataset.error
        raise InputError(
            f"{facility.name}: no dataset at {dataset}: {reason}; give --data {facility.name}=PATH of text"
        )
    return answer.dataset.blocks["train"]


def fit_batch(file: Path, blocks: Sequence[int], wanted: int) -> str | None:
    """Lower `batch_sequences` in federation.yml to what the smallest dataset fills; a sentence if it was changed."""
    batch = largest_batch(blocks, wanted)
    text = file.read_text(encoding="utf-8")
    if batch == wanted or not (found := BATCH.search(text)) or int(found[1]) <= batch:
        return None
    line = f"  batch_sequences: {batch} # the smallest dataset has {number_of(min(blocks), 'block')} to train on"
    write_text(file, BATCH.sub(line, text, count=1))
    return f"batch_sequences: {batch}, since the smallest dataset has {number_of(min(blocks), 'block')} to train on"


def torch_for(federation: Federation, facility: Facility, survey: Survey) -> str:
    """`cpu` where the site has no GPUs, or the template that was made of the answers asks for none; else `cuda`."""
    deployment = facility.deployment
    if deployment.template == f"{facility.name}.sh" and deployment.type in KNOWN_DIRECTIVES:
        template = job_template(deployment, federation.file.parent) or ""
        return "cuda" if gpus_asked(deployment.options, template) else "cpu"
    return "cuda" if survey.gpus or any(one.gpus for one in survey.partitions) else "cpu"


def _bundle(survey: Survey, folder: Path, torch: str) -> Path:
    """A bundle for the site's Python and machine with this torch; an earlier one is used again."""
    python = python_version(survey)
    out = folder / f"bundle-{python}-{survey.machine}-{torch}"
    if not (out / COMPLETE).is_file():
        log.info("%s: downloading what the site needs (AMD GPUs: make one by `crossfed bundle --torch rocm`)", out)
        make_bundle(out, python=python, platform=f"manylinux_2_28_{survey.machine}", torch=torch)
    return out
