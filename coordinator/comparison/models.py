"""The models that are compared, in the archive's `comparison/`: each facility's last update, and those trained alone.

comparison/update.NAME/    its own last update that counted, whole
comparison/alone.NAME/     what it made of the initial model on its own, for as many rounds
comparison/sent/           what the facilities are sent next
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from coordinator.aggregation.first_adapters import started_from
from coordinator.aggregation.rebase import rebase
from coordinator.archive.rounds import Archive
from coordinator.comparison.candidates import candidate, candidates
from coordinator.config.settings import CoordinatorSettings
from facility.exchange.files.durable import new_directory, scratch_directory
from facility.exchange.files.links import link_files, link_tree, replace_by_links
from facility.exchange.messages.comparison import (
    ALONE,
    ALONE_OF,
    FOLDERS,
    GLOBAL,
    INITIAL,
    MODELS,
    OWN,
    ROUNDS,
    STEPS,
    UPDATE_OF,
    OwnModels,
)
from facility.exchange.messages.manifest import (
    NAME,
    RUN,
    SIGNATURE,
    Manifest,
    read_manifest,
    run_of,
    write_manifest,
)

SENT = "sent"


def keep(archive: Archive, prefix: str, updates: Mapping[str, Path]) -> None:
    """Keep each facility's update in place of the one before; the files are shared, not copied, where that can be."""
    for name, update in updates.items():
        replace_by_links(update, archive.compared / f"{prefix}{name}")


def keep_updates(
    archive: Archive,
    settings: CoordinatorSettings,
    updates: Mapping[str, Path],
    left_out: Collection[str],
    *,
    model: Path,
    late: Mapping[str, int],
) -> None:
    """Keep the updates of a round that count, where they will be compared.

    `model`: which the round began with. `late`: by facility, the round that its update was made for, where that is an
    earlier one: it is kept as its facility made it, and not as it was moved to the present model.
    """
    if settings.comparison is None or not settings.comparison.updates:
        return
    counted = {name: path for name, path in updates.items() if name not in left_out}
    keep(archive, UPDATE_OF, {name: path for name, path in counted.items() if name not in late})
    for name in sorted(counted.keys() & late.keys()):
        with scratch_directory(archive.path / "moved-back") as scratch:
            update = counted[name]
            with started_from(update, archive.model_for(late[name]), settings.seed, scratch=scratch) as then:
                rebase(update, then=model, now=then, out=scratch / "made", facility=name)
            keep(archive, UPDATE_OF, {name: scratch / "made"})


def begin(archive: Archive) -> None:
    """Forget what an earlier comparison, which was stopped before another round, made or asked for: of all that lies
    there, the updates alone are of this one."""
    for path in archive.compared.glob("*"):
        if not path.name.startswith(UPDATE_OF):
            shutil.rmtree(path)


def drop(archive: Archive) -> None:
    """Forget the models that were compared: only the global and the initial one outlive the comparison."""
    shutil.rmtree(archive.compared, ignore_errors=True)


def compared(archive: Archive, settings: CoordinatorSettings) -> list[str]:
    """Folders of all models that there are to compare, in order: global and initial first, then by facility."""
    assert settings.comparison is not None
    kept = [f"{prefix}{name}" for prefix in (UPDATE_OF, ALONE_OF) for name in settings.facilities]
    wanted = settings.comparison.updates
    return [
        GLOBAL,
        *([INITIAL] if settings.comparison.matrix else []),
        *candidates(archive, settings.comparison),
        *(name for name in kept if wanted and (archive.compared / name / NAME).is_file()),
    ]


def batches(folders: Sequence[str], most: int) -> list[list[str]]:
    """Folders that are sent together; the global model is in each, since the ranks are built for it."""
    rest = [name for name in folders if name != GLOBAL]
    step = max(1, most - 1)
    return [[GLOBAL, *rest[at : at + step]] for at in range(0, len(rest), step)]


def make_batch(
    archive: Archive,
    settings: CoordinatorSettings,
    folders: Sequence[str],
    own: Mapping[str, OwnModels] | None,
) -> Path:
    """A directory of models, ready to be sent. `own`: what each facility evaluates of its own, where it stays there."""
    final = archive.model_for(len(archive.rounds()))
    sources = {GLOBAL: final, INITIAL: archive.model_for(0)}
    if settings.comparison is not None:
        for name in candidates(archive, settings.comparison):
            sources[name] = candidate(archive, name)
    target = archive.compared / SENT
    shutil.rmtree(target, ignore_errors=True)
    with new_directory(target) as temporary:
        for name in folders:
            link_tree(sources.get(name, archive.compared / name), temporary / name)
            (temporary / name / SIGNATURE).unlink(missing_ok=True)
        extra: dict[str, object] = {FOLDERS: list(folders)}
        if own is not None:
            extra[OWN] = {name: dataclasses.asdict(one) for name, one in own.items()}
        write_manifest(temporary, _manifest(archive, settings, MODELS, extra))
    return target


def make_order(archive: Archive, settings: CoordinatorSettings, rounds: Mapping[str, int], *, whole: bool) -> Path:
    """The order to train alone for one more round; with the initial model if `whole`."""
    target = archive.compared / SENT
    shutil.rmtree(target, ignore_errors=True)
    with new_directory(target) as temporary:
        if whole:
            link_files(archive.model_for(0), temporary, leave=(NAME, SIGNATURE))
        manifest = _manifest(archive, settings, ALONE, {ROUNDS: dict(rounds)} | _steps(archive, settings))
        if whole:
            start = read_manifest(archive.model_for(0))
            manifest = dataclasses.replace(manifest, dtypes=start.dtypes, parameters=start.parameters)
        write_manifest(temporary, manifest)
    return target


def _steps(archive: Archive, settings: CoordinatorSettings) -> dict[str, object]:
    """Steps of each round that a facility's updates counted in, where rounds may differ in them."""
    if settings.even is None:
        return {}
    taken: dict[str, list[int]] = {name: [] for name in settings.facilities}
    for row in (row for entry in archive.history() for row in entry.facilities if row.status == "ok"):
        if row.facility in taken:
            taken[row.facility].append(row.steps)
    return {STEPS: taken}


def _manifest(archive: Archive, settings: CoordinatorSettings, kind: str, extra: dict[str, object]) -> Manifest:
    run = run_of(read_manifest(archive.model_for(len(archive.rounds()))))
    return Manifest(
        kind=kind, federation=settings.federation, round=settings.rounds, extra={RUN: run} | extra if run else extra
    )
