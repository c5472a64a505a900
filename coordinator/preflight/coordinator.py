"""The coordinator's own side: model, programs, room."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import tomllib
from pathlib import Path
from typing import Any

from coordinator.archive.rounds import Archive
from coordinator.config.federation import Federation
from coordinator.engine.render import stale
from coordinator.memory.figures import ModelFigures, model_figures
from coordinator.preflight.disk import IN_FLIGHT, Disk, coordinator_disk
from coordinator.preflight.row import Row, fail, ok, size, skipped, warning
from coordinator.rounds.verification import averages_encoded
from facility.exchange.checkpoints.adapter_targets import parameters_of, targets_of
from facility.exchange.checkpoints.conversion import check_names, model_of
from facility.exchange.checkpoints.families import refusal_of
from facility.exchange.checkpoints.tied_modules import refusal_of_tied
from facility.exchange.errors import CrossFedError, InputError
from facility.exchange.files.links import can_link
from facility.exchange.files.paths import shipped
from facility.exchange.messages.layout import LoraSettings

ME = "coordinator"


def check_here(federation: Federation, *, names: bool = True) -> tuple[list[Row], ModelFigures | None]:
    """`names`: compare the model's tensors, and what adapters are asked for, with the class that its config.json names,
    which imports transformers."""
    rows = [_engine()]
    model_row, model = _model(federation)
    rows.append(model_row)
    if model is not None:
        rows += [*(_fitting(federation) if names else []), _room(federation, model)]
    if differing := stale(federation):
        rows.append(
            warning(
                ME,
                "rendered files",
                f"{len(differing)} differ from federation.yml ({differing[0]}, ...)",
                "crossfed render (crossfed run does it by itself)",
            )
        )
    else:
        rows.append(ok(ME, "rendered files", "those of this federation.yml"))
    return rows, model


def failing_here(federation: Federation) -> list[Row]:
    """Rows that keep a run from beginning. Tensor names and adapters, which take seconds to compare, come last, and
    only where no round has been trained from the model."""
    rows, model = check_here(federation, names=False)
    failing = [row for row in rows if row.verdict == "fail"]
    if not failing and model is not None and not Archive(federation.archive_path).rounds():
        failing = [row for row in _fitting(federation) if row.verdict == "fail"]
    return failing


def _engine() -> Row:
    try:
        wanted = next(
            d.split("==")[1]
            for d in tomllib.loads(shipped("pyproject.toml").read_text())["project"]["optional-dependencies"][
                "coordinator"
            ]
            if d.startswith("streamflow==")
        )
        found = importlib.metadata.version("streamflow")
    except importlib.metadata.PackageNotFoundError:
        return fail(ME, "engine", "StreamFlow is not installed here", "bash coordinator/setup.sh")
    except (OSError, StopIteration):
        return warning(
            ME, "engine", "pyproject.toml does not name a StreamFlow version", "restore the checkout's pyproject.toml"
        )
    if found != wanted:
        return fail(
            ME,
            "engine",
            f"StreamFlow {found} is installed, CrossFed was tested with {wanted}",
            "bash coordinator/setup.sh",
        )
    return ok(ME, "engine", f"StreamFlow {found}")


def _model(federation: Federation) -> tuple[Row, ModelFigures | None]:
    path = federation.path(federation.model)
    if not (path / "config.json").is_file():
        return fail(
            ME,
            "model",
            f"{path} holds no config.json: there is no model",
            "bash coordinator/setup.sh --model NAME --out DIR, or correct `model:`",
        ), None
    try:
        model = model_figures(path)
    except InputError as error:
        return fail(
            ME,
            "model",
            f"the model is damaged: {error}",
            "fetch or convert it again: bash coordinator/setup.sh --model NAME",
        ), None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return fail(
            ME,
            "model",
            f"{path / 'config.json'} cannot be read: {error}",
            "fetch or convert it again: bash coordinator/setup.sh --model NAME",
        ), None
    return ok(ME, "model", f"{model.parameters:,} parameters, {size(model.bytes)}"), model


def _names(path: Path) -> tuple[Row, Any]:
    """Does every parameter of the model that config.json describes get its values from some stored tensor?

    And that model on the meta device; None where it does not fit or could not be built.
    """
    try:
        model = model_of(path)
        conversion = check_names(path, model)
    except ImportError as error:
        return skipped(ME, "tensor names", f"not looked at: {error}"), None
    except CrossFedError as error:
        advice = "convert it again: python -m coordinator.model --source NAME --out DIR"
        return fail(ME, "tensor names", str(error), advice), None
    if reason := refusal_of(path):
        return fail(ME, "model family", reason, "docs/reference/families.md lists the families that were tried"), None
    other = f"; {len(conversion.unused)} tensors of no parameter are sent on as they are" if conversion.unused else ""
    found = f"{len(conversion.same) + len(conversion.pieces)} parameters and buffers{other}"
    return ok(ME, "tensor names", found), model


def _fitting(federation: Federation) -> list[Row]:
    """Does the class that config.json names fit the stored tensors, and each facility's adapters that class?"""
    names, model = _names(federation.path(federation.model))
    if model is None:
        return [names]
    asked = [(one.name, one.training.lora) for one in federation.facilities if one.training.lora.rank]
    return [names, *(row for name, lora in asked for row in (*_adapted(name, lora, model), *_saved(name, lora, model)))]


def _adapted(name: str, lora: LoraSettings, model: Any) -> list[Row]:
    """What the facility's `targets` and `parameters` name that can get no adapter: its job would refuse it."""
    rows = []
    for chosen in (targets_of, parameters_of):
        try:
            chosen(model, lora)
        except ImportError as error:
            rows.append(skipped(name, "adapters", f"their layers are not looked at: {error}"))
        except CrossFedError as error:
            rows.append(fail(name, "adapters", str(error), "correct training.lora in federation.yml"))
    return rows


def _saved(name: str, lora: LoraSettings, model: Any) -> list[Row]:
    """What the facility's `modules_to_save` name that has no weight of its own: its job would refuse it."""
    reasons = [refusal_of_tied(model, module) for module in lora.modules_to_save]
    advice = "correct training.lora.modules_to_save in federation.yml"
    return [fail(name, "adapters", reason, advice) for reason in reasons if reason]


def _room(federation: Federation, model: ModelFigures) -> Row:
    """Is there room for what the archive and the work directory will hold, beyond what they hold now?"""
    archive, work = _existing(federation.archive_path), _existing(federation.workdir_path)
    need = coordinator_disk(
        model,
        {facility.name: facility.training for facility in federation.facilities},
        rule=federation.aggregation.rule,
        rounds=federation.rounds,
        keep_rounds=federation.keep_rounds,
        links=can_link(archive),
        decoded=not averages_encoded(federation),
    )
    if archive.stat().st_dev == work.stat().st_dev:
        places = {archive: need}
    else:
        in_flight = Disk(parts={IN_FLIGHT: need.parts[IN_FLIGHT]})
        places = {archive: need.without(IN_FLIGHT), work: in_flight}
    found = []
    for folder, part in places.items():
        if not os.access(folder, os.W_OK):
            advice = "choose another `archive:` or `workdir:`, or fix its permissions"
            return fail(ME, "room", f"{folder} cannot be written to", advice)
        free, held = shutil.disk_usage(folder).free, _held(federation.archive_path) if folder == archive else 0
        if free + held < part.bytes:
            return fail(
                ME,
                "room",
                f"{size(free)} are free at {folder}, the run needs up to {part}",
                "free some, choose another `archive:` and `workdir:`, or lower keep_rounds",
            )
        found.append(f"{size(free)} free at {folder}, the run needs up to {part}")
    return ok(ME, "room", "; ".join(found))


def _existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above that exists."""
    while not folder.is_dir():
        folder = folder.parent
    return folder


def _held(folder: Path) -> int:
    """Bytes of the weights that are there already: a run that goes on does not need their room again."""
    found = [path.stat() for path in folder.rglob("*.safetensors")] if folder.is_dir() else []
    return sum({(one.st_dev, one.st_ino): one.st_size for one in found}.values())
