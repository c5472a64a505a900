"""What a facility's probe (`python -m facility.probe`) answers, read strictly: it comes from another institution.

Every value that is used has its type and its bounds, text is cleaned, and what is not known is left out. Whatever else
arrives is one error about this facility.
"""

from __future__ import annotations

from typing import Any

from coordinator.preflight.row import Row, fail
from facility.exchange.errors import ManifestError
from facility.exchange.messages.dataset_card import SPLITS
from facility.exchange.messages.strict_json import LARGEST_WHOLE, Fields, parse_json

PROBE_SECONDS = 180.0
"""That a probe may take."""
MOST_BYTES = 1 << 20
LONGEST = 300
"""Characters of a text for a person."""
WHERE = "the probe's answer"


def answer_or_row(text: str) -> tuple[dict[str, Any] | None, Row | None]:
    """The answer, or a row (with an empty subject) on what is wrong with it."""
    try:
        return read_probe_answer(text), None
    except ManifestError as error:
        return None, fail("", "environment", str(error), "bring both sides to one version of CrossFed, or ask the site")


def read_probe_answer(text: str) -> dict[str, Any]:
    """The answer, whose last line is JSON. Raises `ManifestError`."""
    if len(text) > MOST_BYTES:
        raise ManifestError(f"{WHERE} has {len(text)} characters, expected at most {MOST_BYTES}")
    fields = last_line(text, WHERE)
    answer: dict[str, Any] = {
        "crossfed": fields.words("crossfed", longest=40),
        "python": fields.words("python", longest=40),
        "packages": _versions(fields, "packages"),
        "formats": {name: fields.inside("formats").whole(name) for name in fields.mapping("formats", 50)},
        "dataset": _dataset(fields.inside("dataset")),
        "disk": _disk(fields.inside("disk")),
    }
    if missing := [name for name in ("torch", "transformers") if name not in answer["packages"]]:
        raise ManifestError(f"{WHERE} lacks {', '.join(missing)} in packages")
    if "settings_keys" in fields.raw:
        keys = fields.items("settings_keys", 2000, lambda inside, place: inside.words(place, longest=LONGEST))
        answer["settings_keys"] = frozenset(keys)
    if "optional" in fields.raw:
        answer["optional"] = _versions(fields, "optional")
    if "unmet" in fields.raw:
        answer["unmet"] = fields.items("unmet", 50, lambda inside, place: inside.words(place, longest=LONGEST))
    if "base_model" in fields.raw:
        answer["base_model"] = _base_model(fields.inside("base_model"))
    if "trainer" in fields.raw:
        answer["trainer"] = fields.words("trainer", "", longest=LONGEST)
    return answer


def last_line(text: str, where: str) -> Fields:
    """The fields of the object that the last line of an answer is. Raises `ManifestError`."""
    lines = text.strip().splitlines()
    return Fields(raw=parse_json(lines[-1] if lines else "", where=where), where=where)


def _versions(fields: Fields, name: str) -> dict[str, str | None]:
    inside = fields.inside(name)
    return {key: None if value is None else inside.words(key, longest=40) for key, value in inside.raw.items()}


def _dataset(fields: Fields) -> dict[str, Any]:
    if "error" in fields.raw:
        return {"error": fields.words("error", longest=LONGEST)}
    answer: dict[str, Any] = {
        "block_tokens": fields.whole("block_tokens", least=1),
        "vocabulary_size": fields.whole("vocabulary_size"),
        "blocks": _counts(fields.inside("blocks")),
        "documents": _counts(fields.inside("documents")) if fields.raw.get("documents") else {},
        "classes": fields.whole("classes", 0),
        "hides_rests": fields.flag("hides_rests", False),
    }
    texts = (
        "task",
        "tokenizer_sha256",
        "chat_template_sha256",
        "classes_sha256",
        "image_size",
        "image_processor_sha256",
    )
    return answer | {name: fields.words(name, longest=100) for name in texts if fields.raw.get(name) is not None}


def _counts(fields: Fields) -> dict[str, int]:
    return {name: fields.whole(name, 0) for name in SPLITS}


def _disk(fields: Fields) -> dict[str, Any]:
    answer: dict[str, Any] = {
        "writable": fields.flag("writable", False),
        "free": fields.whole("free"),
        "quotas": fields.items("quotas", 100, lambda items, key: _quota(items.inside(key))),
    }
    texts = ("refused", "shared", "above")
    return answer | {name: fields.words(name, longest=LONGEST) for name in texts if name in fields.raw}


def _quota(fields: Fields) -> dict[str, Any]:
    free = {
        name: None if fields.raw.get(name) is None else fields.whole(name, least=-LARGEST_WHOLE)
        for name in ("free", "files_free")
    }
    return {"of": fields.words("of", longest=100), **free}


def _base_model(fields: Fields) -> dict[str, Any]:
    if "error" in fields.raw:
        return {"error": fields.words("error", longest=LONGEST)}
    digest = None if fields.raw.get("sha256") is None else fields.digest("sha256")
    return {"bytes": fields.whole("bytes"), "sha256": digest, "seconds": fields.number("seconds", 0.0, most=1e6)}
