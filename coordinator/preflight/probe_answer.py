"""What a facility's probe (`python -m facility.probe`) answers, read strictly: it comes from another institution.

Every value that is used has its type and its bounds, text is cleaned, and what is not known is left out. Whatever else
arrives is one error about this facility.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import get_args

from coordinator.preflight.row import Row, fail
from facility.exchange.errors import ManifestError
from facility.exchange.messages.dataset_card import SPLITS
from facility.exchange.messages.privacy import Unit
from facility.exchange.messages.strict_json import LARGEST_WHOLE, Fields, parse_json

PROBE_SECONDS = 180.0
"""That a probe may take."""
MOST_BYTES = 1 << 20
LONGEST = 300
"""Characters of a text for a person."""
LONGEST_REFUSAL = 800
"""Characters of a sentence in which the facility's own code says what a job would refuse."""
WHERE = "the probe's answer"


@dataclass(frozen=True, kw_only=True)
class DatasetAnswer:
    """What a probe says of the facility's dataset."""

    error: str = ""
    """Why it cannot be used; then nothing else is known. `missing`: there is none."""
    task: str | None = None
    block_tokens: int = 0
    vocabulary_size: int = 0
    blocks: Mapping[str, int] = field(default_factory=dict)
    """By split."""
    documents: Mapping[str, int] = field(default_factory=dict)
    """By split; empty where blocks join documents."""
    classes: int = 0
    hides_rests: bool = False
    """Whether it does not record where a document goes on in the next block."""
    separate: bool = False
    """Whether documents share its blocks without seeing each other."""
    refused_units: Mapping[str, str] = field(default_factory=dict)
    """By kind of unit, why differential privacy cannot protect such ones of it."""
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None
    classes_sha256: str | None = None
    image_size: str | None = None
    image_processor_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class QuotaAnswer:
    """What a quota leaves; None: it does not limit that."""

    of: str
    free: int | None
    """Bytes."""
    files_free: int | None


@dataclass(frozen=True, kw_only=True)
class DiskAnswer:
    """What a probe says of the file system of the facility's `workdir`."""

    writable: bool
    free: int
    """Bytes."""
    quotas: list[QuotaAnswer] = field(default_factory=list)
    refused: str | None = None
    """Why room could not be reserved."""
    shared: str | None = None
    """Which directory others may write."""
    above: str | None = None
    """Which directory above it every account of the host may write."""


@dataclass(frozen=True, kw_only=True)
class BaseModelAnswer:
    """What a probe says of the base model that stays at the facility."""

    error: str = ""
    bytes: int = 0
    sha256: str | None = None
    """None where it was not hashed within the probe's time."""
    seconds: float = 0.0
    """That it was hashed for; 0: it never was."""


@dataclass(frozen=True, kw_only=True)
class ProbeAnswer:
    """All that a probe says. None: the facility's CrossFed is older than the question, or it was not asked."""

    crossfed: str
    python: str
    packages: Mapping[str, str | None]
    """Versions of what a trainer needs, torch and transformers among them; None: not installed."""
    formats: Mapping[str, int]
    dataset: DatasetAnswer
    disk: DiskAnswer
    settings_keys: frozenset[str] | None = None
    optional: Mapping[str, str | None] | None = None
    """Versions of what only some settings need."""
    unmet: list[str] = field(default_factory=list)
    """Requirements of CrossFed that other versions are installed for."""
    base_model: BaseModelAnswer | None = None
    trainer: str | None = None
    """Why the federation's own trainer cannot be started; empty: it can."""
    clock: float = 0.0
    """Seconds by which the facility's clock is ahead at least, negative: behind."""


def answer_or_row(text: str) -> ProbeAnswer | Row:
    """The answer, or a row (with an empty subject) on what is wrong with it."""
    try:
        return read_probe_answer(text)
    except ManifestError as error:
        return fail("", "environment", str(error), "bring both sides to one version of CrossFed, or ask the site")


def read_probe_answer(text: str) -> ProbeAnswer:
    """The answer, whose last line is JSON. Raises `ManifestError`."""
    if len(text) > MOST_BYTES:
        raise ManifestError(f"{WHERE} has {len(text)} characters, expected at most {MOST_BYTES}")
    fields = last_line(text, WHERE)
    raw, packages = fields.raw, _versions(fields, "packages")
    if missing := [name for name in ("torch", "transformers") if name not in packages]:
        raise ManifestError(f"{WHERE} lacks {', '.join(missing)} in packages")
    return ProbeAnswer(
        crossfed=fields.words("crossfed", longest=40),
        python=fields.words("python", longest=40),
        packages=packages,
        formats={name: fields.inside("formats").whole(name) for name in fields.mapping("formats", 50)},
        dataset=_dataset(fields.inside("dataset")),
        disk=_disk(fields.inside("disk")),
        settings_keys=frozenset(_texts(fields, "settings_keys", 2000)) if "settings_keys" in raw else None,
        optional=_versions(fields, "optional") if "optional" in raw else None,
        unmet=_texts(fields, "unmet", 50) if "unmet" in raw else [],
        base_model=_base_model(fields.inside("base_model")) if "base_model" in raw else None,
        trainer=fields.words("trainer", "", longest=LONGEST) if "trainer" in raw else None,
    )


def last_line(text: str, where: str) -> Fields:
    """The fields of the object that the last line of an answer is. Raises `ManifestError`."""
    lines = text.strip().splitlines()
    return Fields(raw=parse_json(lines[-1] if lines else "", where=where), where=where)


def _versions(fields: Fields, name: str) -> dict[str, str | None]:
    inside = fields.inside(name)
    return {key: None if value is None else inside.words(key, longest=40) for key, value in inside.raw.items()}


def _texts(fields: Fields, name: str, most: int) -> list[str]:
    return fields.items(name, most, lambda inside, place: inside.words(place, longest=LONGEST))


def _text_if_any(fields: Fields, name: str, longest: int) -> str | None:
    return None if fields.raw.get(name) is None else fields.words(name, longest=longest)


def _dataset(fields: Fields) -> DatasetAnswer:
    if "error" in fields.raw:
        return DatasetAnswer(error=fields.words("error", longest=LONGEST) or "it gave no reason")
    return DatasetAnswer(
        task=_text_if_any(fields, "task", 100),
        block_tokens=fields.whole("block_tokens", least=1),
        vocabulary_size=fields.whole("vocabulary_size"),
        blocks=_counts(fields.inside("blocks")),
        documents=_counts(fields.inside("documents")) if fields.raw.get("documents") else {},
        classes=fields.whole("classes", 0),
        hides_rests=fields.flag("hides_rests", False),
        separate=fields.flag("separate", False),
        refused_units=_refused(fields.inside("refused_units")) if "refused_units" in fields.raw else {},
        tokenizer_sha256=_text_if_any(fields, "tokenizer_sha256", 100),
        chat_template_sha256=_text_if_any(fields, "chat_template_sha256", 100),
        classes_sha256=_text_if_any(fields, "classes_sha256", 100),
        image_size=_text_if_any(fields, "image_size", 100),
        image_processor_sha256=_text_if_any(fields, "image_processor_sha256", 100),
    )


def _refused(fields: Fields) -> dict[str, str]:
    return {unit: fields.words(unit, longest=LONGEST_REFUSAL) for unit in get_args(Unit) if unit in fields.raw}


def _counts(fields: Fields) -> dict[str, int]:
    return {name: fields.whole(name, 0) for name in SPLITS}


def _disk(fields: Fields) -> DiskAnswer:
    return DiskAnswer(
        writable=fields.flag("writable", False),
        free=fields.whole("free"),
        quotas=fields.items("quotas", 100, lambda items, key: _quota(items.inside(key))),
        refused=fields.words("refused", longest=LONGEST) if "refused" in fields.raw else None,
        shared=fields.words("shared", longest=LONGEST) if "shared" in fields.raw else None,
        above=fields.words("above", longest=LONGEST) if "above" in fields.raw else None,
    )


def _quota(fields: Fields) -> QuotaAnswer:
    return QuotaAnswer(
        of=fields.words("of", longest=100), free=_left(fields, "free"), files_free=_left(fields, "files_free")
    )


def _left(fields: Fields, name: str) -> int | None:
    """Negative where more is used than the quota allows."""
    return None if fields.raw.get(name) is None else fields.whole(name, least=-LARGEST_WHOLE)


def _base_model(fields: Fields) -> BaseModelAnswer:
    if "error" in fields.raw:
        return BaseModelAnswer(error=fields.words("error", longest=LONGEST) or "it gave no reason")
    digest = None if fields.raw.get("sha256") is None else fields.digest("sha256")
    return BaseModelAnswer(bytes=fields.whole("bytes"), sha256=digest, seconds=fields.number("seconds", 0.0, most=1e6))
