"""Federations drawn at random whose federation.yml is edited between their rounds, and which go back in between."""

from __future__ import annotations

import dataclasses
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator.archive.rewind import rewind
from coordinator.archive.rounds import Archive
from coordinator.config.described import describe_federation
from coordinator.config.federation import Federation, read_federation
from coordinator.engine.render import write_rendered
from coordinator.preflight.coordinator import check_here
from coordinator.preflight.fitting import check_fitting
from coordinator.rounds.acceptance import accept, changes_since
from facility.exchange.errors import ConfigurationError, InputError
from facility.exchange.task_words import Task
from tests.rounds.by_steps import BySteps
from tests.rounds.drawn import Drawn, draw, under_masks

KEPT = ("rounds", "seed", "aggregation", "pretrained")
"""Sections of which an edit changes keys, or which it leaves alone."""

MASKED = {"secure_aggregation": True, "minimum_sum": 2}
NEEDED = ("steps", "batch_sequences", "learning_rate", "count")


@dataclass(frozen=True, kw_only=True)
class Edit:
    """What a person does after some complete rounds."""

    after: int
    to: Drawn
    back: int | None
    """The round to which the federation goes back as well."""


def draw_edits(drawn: Drawn, seed: int) -> list[Edit]:
    """One or two edits of a federation, each drawn from another federation's settings."""
    chance = random.Random(f"edits {seed}")
    edits: list[Edit] = []
    for number in range(chance.choice([1, 1, 2])):
        other = draw(chance.randrange(1 << 30))
        other = under_masks(other, chance.randrange(1 << 30)) if drawn.masked else other
        now = edits[-1].to if edits else drawn
        after = number + 1
        back = chance.randrange(after) if chance.random() < 0.2 else None
        edits.append(Edit(after=after, to=edited(now, other, chance, after), back=back))
    return edits


def edited(drawn: Drawn, other: Drawn, chance: random.Random, after: int) -> Drawn:
    """The federation with some settings of another one, at least one round more, and another facility or one less."""
    settings = {key: value for key, value in drawn.settings.items() if key in KEPT or chance.random() < 0.7}
    settings |= {key: value for key, value in other.settings.items() if key not in KEPT and chance.random() < 0.5}
    aggregation = mixed(drawn.settings["aggregation"], other.settings["aggregation"], chance)
    rounds = mixed(drawn.settings["rounds"], other.settings["rounds"], chance)
    settings |= {"aggregation": aggregation, "rounds": rounds | {"count": after + chance.choice([1, 2])}}
    if drawn.masked:
        settings["privacy"] = mixed(drawn.settings["privacy"], other.settings["privacy"], chance) | MASKED
    training = mixed(drawn.training, other.training, chance)
    if "lora" in drawn.training and chance.random() < 0.8:
        training["lora"] = drawn.training["lora"]
    names = list(drawn.names)
    if chance.random() < 0.25 and len(names) > 1:
        names.remove(chance.choice(names))
    elif chance.random() < 0.25:
        names.append(next(name for name in "abcdef" if name not in names))
    own = chance.choice([drawn.own, drawn.own, other.own])
    return dataclasses.replace(drawn, names=names, training=training, settings=settings, own=own)


def mixed(these: Mapping[str, Any], those: Mapping[str, Any], chance: random.Random) -> dict[str, Any]:
    """Most of these settings, with some of those."""
    found = {key: value for key, value in these.items() if chance.random() < 0.85}
    found |= {key: value for key, value in those.items() if chance.random() < 0.3}
    return {key: these[key] for key in NEEDED if key in these} | found


def refusal_of(federation: Federation, task: Task, names: list[str]) -> str:
    """Why `crossfed check` refuses it; nothing where it does not."""
    rows, model = check_here(federation)
    if model is not None:
        rows += check_fitting(federation, dict.fromkeys(names, task))
    return "\n".join(row.found for row in rows if row.verdict == "fail")


@dataclass(kw_only=True)
class Edited(BySteps):
    """One federation whose file is edited as it runs."""

    edits: list[Edit]
    more: Mapping[str, Any] = field(default_factory=dict)
    """Of `training` in every version of the file."""
    refusals: list[str] = field(default_factory=list)
    """Why edits were refused, after which the file is as it was; without numbers of lines."""

    def edited(self) -> bool:
        """Whether the complete rounds are as many as those of the next edit, which is made."""
        archive = Archive(self.federation.archive_path)
        if not self.edits or self.edits[0].after != len(archive.rounds()):
            return False
        edit = self.edits.pop(0)
        self.edit(edit)
        if edit.back is not None:
            rewind(archive, edit.back)
            self.at_work.clear()
        return True

    def edit(self, edit: Edit) -> None:
        """Write the edited file, and go on with it as `crossfed run --accept` does, unless it is refused."""
        scratch = self.root / f"edit-{edit.after}"
        text = edit.to.write(scratch, keys=self.root / "keys", **self.more).read_text()
        for place in (scratch / "sites").iterdir():
            if not (self.root / "sites" / place.name).exists():
                shutil.copytree(place, self.root / "sites" / place.name)
        before = self.file.read_text()
        self.file.write_text(text)
        try:
            federation = read_federation(self.file)
            if reason := refusal_of(federation, edit.to.task, edit.to.names):
                raise ConfigurationError(reason)
            archive, now = Archive(federation.archive_path), describe_federation(federation)
            if changes_since(archive, now):
                accept(archive, now)
        except InputError as error:
            self.refusals.append(re.sub(r"\.yml:\d+:", ".yml:", str(error).replace(str(self.root), "")))
            self.file.write_text(before)
            return
        self.federation = federation
        write_rendered(federation)
