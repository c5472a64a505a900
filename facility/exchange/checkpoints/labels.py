"""The classes of a classifier's head: their names in config.json, and a digest by which both sides compare them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

DEFAULT = 2
"""Classes of a head whose config.json names none: transformers leaves out what it would assume."""

ONE_OF_SEVERAL = "single_label_classification"
"""transformers' `problem_type` of what is trained here: an example has one class, the loss is the cross entropy."""


def default_labels(count: int) -> list[str]:
    """The names that transformers gives to classes without any."""
    return [f"LABEL_{number}" for number in range(count)]


def labels_in(config: Mapping[str, Any]) -> list[str]:
    """The names of the classes in config.json, by number; those of `default_labels` where it names none."""
    named = config.get("id2label")
    if not isinstance(named, Mapping):
        return default_labels(DEFAULT)
    return [str(named.get(str(number), "")) for number in range(len(named))]


def other_problem(config: Mapping[str, Any]) -> str:
    """What config.json says that the head answers, where that is not one class of several: `regression`, or several
    classes at once. transformers reads the answers of such a head in another way than they are trained here."""
    problem = config.get("problem_type")
    return "" if problem in (None, ONE_OF_SEVERAL) else str(problem)


def classes_digest(names: Sequence[str]) -> str:
    """SHA-256 of the names in their order."""
    return hashlib.sha256(json.dumps(list(names), ensure_ascii=True).encode()).hexdigest()
