"""Preflight checks of the coordinator's own machine: StreamFlow, the model, disk, rendered files.

Nothing is connected to and nothing is written. `crossfed check` shows all rows; `crossfed run` refuses to begin where
one of them fails.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path

from coordinator.archive.rewind import ASIDE
from coordinator.archive.rounds import Archive
from coordinator.config.federation import Federation
from coordinator.engine.render import files_it_would_replace, render, stale_files
from coordinator.memory.figures import ModelFigures, model_figures
from coordinator.preflight.disk import IN_FLIGHT, Disk, coordinator_disk
from coordinator.preflight.fitting import check_fitting
from coordinator.preflight.row import ME, Row, fail, ok, warning
from coordinator.rounds.verification import averages_encoded
from facility.exchange.checkpoints.companions import TENSORS, refuse_links_elsewhere
from facility.exchange.errors import InputError
from facility.exchange.files import present
from facility.exchange.files.links import can_link
from facility.exchange.files.owners import not_ours, of_another, written_by_all
from facility.exchange.files.paths import shipped_path
from facility.exchange.messages.template_inheritance import find_template
from facility.exchange.sizes import format_bytes

OTHER_AS_URL = re.compile("[#?]|%[0-9A-Fa-f]{2}")
"""What ends the path in a URL, or stands for another character there."""


def check_here(federation: Federation) -> tuple[list[Row], ModelFigures | None]:
    """Rows on the engine, the model, room and rendered files, and what the model is."""
    rows = [_engine()]
    model_row, model = _model(federation)
    rows.append(model_row)
    if model is not None:
        rows.append(_room(federation, model))
    rendered = render(federation)
    differing = stale_files(federation, rendered)
    root = federation.file.parent.parent
    closed = [folder for name in differing if not _is_open(folder := _existing((root / name).parent))]
    if closed:
        rows.append(
            fail(
                ME,
                "rendered files",
                f"{closed[0]} cannot be written to, and crossfed run renders federation.yml there",
                "correct its permissions, or move federation.yml to a folder of your own",
            )
        )
    elif own := files_it_would_replace(federation, rendered):
        rows.append(
            fail(
                ME,
                "rendered files",
                f"{own[0]} was not rendered by CrossFed, and crossfed run would replace it",
                "move it away (a template of your own to another name), or keep federation.yml in a folder of its own",
            )
        )
    elif not any((root / name).exists() for name in rendered):
        rows.append(ok(ME, "rendered files", "none yet: crossfed run renders them"))
    elif differing:
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
    return [*rows, *_other_as_url(federation), *_not_ours(federation), *_open_to_all(federation)], model


def _other_as_url(federation: Federation) -> list[Row]:
    """A row where a path that StreamFlow opens means another one as a URL, which CWL has paths as; none otherwise."""
    places = {"federation.yml": federation.file.parent, "workdir": federation.workdir_path}
    for key, place in (places | {"model": federation.path(federation.model)}).items():
        if found := OTHER_AS_URL.search(str(place)):
            said = f"{key} is in {place}, where CWL, which has paths as URLs, takes {found[0]!r} for something else"
            return [
                fail(ME, key, said, "rename that folder, or name another: without '#', '?' and '%' before two digits")
            ]
    return []


def _not_ours(federation: Federation) -> list[Row]:
    """A row where another account of this host made the archive or the work directory, or may write it, and exchanges
    what a run keeps and starts there; none otherwise."""
    for key, place in (("archive", federation.archive_path), ("workdir", federation.workdir_path)):
        if found := of_another(place):
            fix = f"have it removed, or choose another `{key}:` in federation.yml"
            return [fail(ME, key, f"{found}, who could exchange what a run keeps there", fix)]
        if not_ours(place):
            return [fail(ME, key, _written_by_all(place), f"chmod o-w {shlex.quote(str(place))}")]
    return []


def _written_by_all(place: Path) -> str:
    return f"every user of this host may write {place}, and with it decide what this account runs"


def _open_to_all(federation: Federation) -> list[Row]:
    """A warning where every user of this host may decide what a run does, as under a umask of 000; none otherwise."""
    if (place := next(filter(None, map(written_by_all, _decisive(federation))), None)) is None:
        return []
    fix = f"chmod o-w {shlex.quote(str(place))}; set umask 022 or 077"
    return [warning(ME, "permissions", _written_by_all(place), fix)]


def _decisive(federation: Federation) -> Iterator[Path]:
    """Files and folders that say what is run, here and at facilities, and what is believed."""
    yield federation.file
    for facility in federation.facilities:
        if facility.deployment.template:
            yield find_template(facility.deployment.template, federation.file.parent)
    if federation.aggregation.allowed_signers:
        yield federation.path(federation.aggregation.allowed_signers)
    yield from (federation.archive_path, federation.workdir_path)


def failing_here(federation: Federation) -> list[Row]:
    """Rows that keep a run from beginning. Tensor names and adapters, which take seconds to compare, come last, and
    only where no round has been trained from the model."""
    rows, model = check_here(federation)
    failing = [row for row in rows if row.verdict == "fail"]
    if not failing and model is not None and not Archive(federation.archive_path).rounds():
        failing = [row for row in check_fitting(federation) if row.verdict == "fail"]
    return failing


def _engine() -> Row:
    try:
        wanted = next(
            d.split("==")[1]
            for d in tomllib.loads(shipped_path("pyproject.toml").read_text(encoding="utf-8"))["project"][
                "optional-dependencies"
            ]["coordinator"]
            if d.startswith("streamflow==")
        )
        found = importlib.metadata.version("streamflow")
    except importlib.metadata.PackageNotFoundError:
        return fail(
            ME,
            "engine",
            "StreamFlow is not installed here",
            "pip install 'crossfed[coordinator]', or bash coordinator/setup.sh in a checkout",
        )
    except (OSError, StopIteration):
        return warning(
            ME, "engine", "pyproject.toml does not name a StreamFlow version", "restore the checkout's pyproject.toml"
        )
    if found != wanted:
        return fail(
            ME,
            "engine",
            f"StreamFlow {found} is installed, CrossFed was tested with {wanted}",
            "pip install 'crossfed[coordinator]', or bash coordinator/setup.sh in a checkout",
        )
    return ok(ME, "engine", f"StreamFlow {found}")


def _model(federation: Federation) -> tuple[Row, ModelFigures | None]:
    path = federation.path(federation.model)
    if not (path / "config.json").is_file():
        return fail(
            ME,
            "model",
            f"{path} holds no config.json: there is no model",
            "crossfed model NAME --out DIR, with a name of the hub or a checkpoint's folder, or correct `model:`",
        ), None
    try:
        if not present.exists(Archive(federation.archive_path).model_for(0)):  # later it is that which is sent
            refuse_links_elsewhere(path, but=TENSORS)  # weights may lie on a larger disk
    except InputError as error:
        fix = "remove the link, or put the file itself there if it belongs to the model"
        return fail(ME, "model", f"{error}, since every facility is sent what lies there", fix), None
    try:
        model = model_figures(path)
    except InputError as error:
        return fail(
            ME,
            "model",
            f"the model is damaged: {error}",
            "fetch or convert it again: crossfed model NAME --out DIR",
        ), None
    return ok(ME, "model", f"{model.parameters:,} parameters, {format_bytes(model.bytes)}"), model


def _room(federation: Federation, model: ModelFigures) -> Row:
    """A row on the room for what the archive and the work directory will hold, beyond what they hold now."""
    archive, work = _existing(federation.archive_path), _existing(federation.workdir_path)
    need = coordinator_disk(
        model,
        federation.training_of,
        rule=federation.aggregation.rule,
        rounds=federation.rounds,
        keep_rounds=federation.keep_rounds,
        links=can_link(archive),
        decoded=not averages_encoded(federation),
        sending=federation.sending,
        limited=federation.limits is not None,
        comparison=federation.evaluation.comparison(masked=bool(federation.masks)),
        federated=federation.aggregation.federated,
        masked_bits=federation.masked_bits,
    )
    for folder in (archive, work):
        if not _is_open(folder):
            advice = "choose another `archive:` or `workdir:`, or fix its permissions"
            return fail(ME, "room", f"{folder} cannot be written to", advice)
    if archive.stat().st_dev == work.stat().st_dev:
        places = {archive: need}
    else:
        in_flight = Disk(parts={IN_FLIGHT: need.parts[IN_FLIGHT]})
        places = {archive: need.without(IN_FLIGHT), work: in_flight}
    found = []
    for folder, part in places.items():
        free, held = shutil.disk_usage(folder).free, _held(federation.archive_path) if folder == archive else 0
        if free + held < part.bytes:
            return fail(
                ME,
                "room",
                f"{format_bytes(free)} are free at {folder}, the run needs up to {part}",
                "free some, choose another `archive:` and `workdir:`, or lower keep_rounds",
            )
        found.append(f"{format_bytes(free)} free at {folder}, the run needs up to {part}")
    return ok(ME, "room", "; ".join(found))


def _is_open(folder: Path) -> bool:
    """Whether files can be made in the folder."""
    return os.access(folder, os.W_OK | os.X_OK)


def _existing(folder: Path) -> Path:
    """The folder itself, or the nearest one above that exists."""
    while not present.is_dir(folder):
        folder = folder.parent
    return folder


def _held(folder: Path) -> int:
    """Bytes of the weights that are there already: a run that goes on does not need their room again.

    Rounds that were set aside (`crossfed rewind`) stay, whatever a run does.
    """
    weights = folder.rglob("*.safetensors") if folder.is_dir() else ()
    found = [path.stat() for path in weights if not path.relative_to(folder).parts[0].startswith(ASIDE)]
    return sum({(one.st_dev, one.st_ino): one.st_size for one in found}.values())
