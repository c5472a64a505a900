"""lm-eval's own command on a model, in this job and without a network; only its scores leave the facility."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from facility.exchange.checkpoints.adapter_twins import write_as_loaded
from facility.exchange.checkpoints.adapters import CONFIG, check_no_module, is_adapter
from facility.exchange.checkpoints.checkpoint import ADAPTER, open_checkpoint
from facility.exchange.checkpoints.task_class import check_attention
from facility.exchange.child import end_with_parent
from facility.exchange.errors import CrossFedError, InputError, TransientError
from facility.exchange.files.compiled_code import compiled_code_place
from facility.exchange.files.paths import resolve_path
from facility.exchange.json_values import values_in
from facility.exchange.messages.comparison import with_tasks
from facility.exchange.messages.evaluation import EvaluationSettings, Score, with_scores
from facility.exchange.messages.report import output_leaves
from facility.exchange.messages.settings import FacilitySettings

log = logging.getLogger(__name__)

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_EVALUATE_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""By which torchrun and others say that a process is one of several; accelerate, which lm-eval runs on, waits for the
others where it finds LOCAL_RANK."""
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


def named(folder: Path, links: Mapping[str, Path | str | None]) -> dict[str, Path]:
    """Links in `folder` to what there is: a comma in a path would end a value of `--model_args` and begin a key."""
    for name, target in links.items():
        if target:
            (folder / name).symlink_to(Path(target).absolute())
    return {name: folder / name for name, target in links.items() if target}


def command(settings: EvaluationSettings, out: Path, links: Mapping[str, Path], *, device: str) -> list[str]:
    """The command line of lm-eval. `links`: `model`, and perhaps its `tokenizer`."""
    arguments = f"pretrained={links['model']}"
    arguments += f",tokenizer={links['tokenizer']}" if "tokenizer" in links else ""
    words = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", arguments]
    words += ["--tasks", ",".join(settings.tasks), "--batch_size", str(settings.batch), "--output_path", str(out)]
    words += ["--device", "cpu"] if device == "cpu" else []
    words += ["--include_path", str(resolve_path(settings.directory))] if settings.directory else []
    return words + (["--limit", str(settings.limit)] if settings.limit else [])


def evaluate_model(
    model: Path, settings: EvaluationSettings, *, dataset: Path, base: str = "", device: str = "auto"
) -> list[Score]:
    """Scores of `model`. Raises `TransientError` with the end of lm-eval's output where it fails or takes too long, and
    `InputError` for adapters without a model below them."""
    has_tokenizer = any((model / name).is_file() for name in TOKENIZERS)
    own = dataset / "tokenizer"
    tokenizer = own if not has_tokenizer and own.is_dir() else None
    check_attention(model)
    check_no_module(model)
    log.info("lm-eval scores %s, which may take up to %g minutes", ", ".join(settings.tasks), settings.minutes)
    with tempfile.TemporaryDirectory(prefix="lm-eval-") as folder:
        links = {"model": whole(model, base, Path(folder)), "tokenizer": tokenizer}
        words = command(settings, Path(folder), named(Path(folder), links), device=device)
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED} | OFFLINE
        environment |= compiled_code_place()
        (empty := Path(folder) / "empty").mkdir()
        with open(Path(folder) / "log", "w+b") as output:
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=empty,  # lm-eval reads a file or folder here that is named like a task, and calls what it names
                env=environment,
                start_new_session=True,
                preexec_fn=end_with_parent(signal.SIGKILL),  # nobody else would end it: it has no limit of its own
            )
            try:
                code = process.wait(settings.minutes * 60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise TransientError(f"lm-eval took more than {settings.minutes} minutes") from None
            output.seek(0)
            said = output.read().decode(errors="replace").strip().splitlines()
        files = sorted(Path(folder).rglob("results*.json"))
        if code or not files:
            raise TransientError(f"lm-eval ended with code {code}: {_end_of_output(said[-3:])}")
        return scores_in(values_in(files[-1])["results"])


def _end_of_output(lines: list[str]) -> str:
    """The end of its output, for the coordinator to read; where what jobs print stays here it is in this job's log."""
    text = " / ".join(lines) or "it said nothing"
    if output_leaves():
        return text
    log.warning("lm-eval said: %s", text)
    return "what it said is in the log of this facility's job"


def whole(model: Path, base: str, folder: Path) -> Path:
    """`model`; for adapters alone the `base` below them with the adapters beside it, as links in `folder`, which
    transformers loads as it loads the models of other rounds; and where it would load adapters otherwise than they were
    trained (`adapter_twins`), the same with these written anew. Raises `InputError` for adapters without a base."""
    if not (model / CONFIG).is_file():
        return model
    held, place = open_checkpoint(model), folder / "whole"
    alone = all(map(is_adapter, held.tensors))
    if alone and not base:
        raise InputError(
            f"{model} holds adapters alone, and no model below them is known here: let a facility whose "
            "training.lora.base names one evaluate (`evaluation.facility`)"
        )
    below = Path(base) if alone else model
    place.mkdir()
    if not write_as_loaded(model, below, place) and not alone:
        return model
    files = {path.name: path for path in below.iterdir() if path.is_file()}
    if alone:
        (adapters,) = {entry.file for entry in held.tensors.values()}
        files |= {ADAPTER: adapters, CONFIG: model / CONFIG}
    for name, path in files.items():
        if not (place / name).exists():
            (place / name).symlink_to(path.absolute())
    return place


def write_scores(model: Path, out: Path, settings: FacilitySettings, *, dataset: Path) -> None:
    """Evaluate the received model on tasks; an evaluation that fails is reported and costs no update."""
    try:
        scores = evaluate_model(
            model, settings.evaluation, dataset=dataset, base=base_below(settings), device=settings.training.device
        )
        with_scores(out, scores)
    except (CrossFedError, OSError, ValueError, KeyError) as error:
        log.warning("the evaluation on tasks failed: %s", error)
        with_scores(out, [], problem=str(error))


def write_scores_of_models(models: Mapping[str, Path], out: Path, settings: FacilitySettings, *, dataset: Path) -> None:
    """Evaluate several models, given by name, on tasks and write their scores; one that fails has none."""
    found: list[dict[str, Any]] = []
    for folder, model in models.items() if settings.evaluation.tasks else ():
        try:
            scores = evaluate_model(
                model,
                settings.evaluation,
                dataset=dataset,
                base=base_below(settings),
                device=settings.training.device,
            )
        except (CrossFedError, OSError, ValueError, KeyError) as error:
            log.warning("the evaluation of %s on tasks failed: %s", folder, error)
            continue
        found += [{"model": folder} | dataclasses.asdict(one) for one in scores]
    if found:
        with_tasks(out, found)


def base_below(settings: FacilitySettings) -> str:
    """The model below adapters that travel alone, or ''."""
    lora = settings.training.lora
    return str(resolve_path(lora.base)) if lora.rank and lora.base else ""


def scores_in(results: Mapping[str, Mapping[str, Any]]) -> list[Score]:
    """Figures of lm-eval's results: `acc,none` and its error `acc_stderr,none`."""
    found = []
    for task, figures in sorted(results.items()):
        for key, value in sorted(figures.items()):
            metric, comma, rest = key.partition(",")
            if not comma or metric.endswith("_stderr") or not _finite(value):
                continue
            error = figures.get(f"{metric}_stderr,{rest}")
            stderr = float(error) if error is not None and _finite(error) else None
            name = metric if rest == "none" else f"{metric} ({rest})"
            found.append(Score(task=task, metric=name, value=float(value), stderr=stderr))
    return found


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
