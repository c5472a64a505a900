"""The task of a federation's model (text, masked text, classes), by which tables and reports word their figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from coordinator.archive.rounds import Archive, FacilityRow, RoundFile
from facility.exchange.checkpoints.model_files import model_file_if_any
from facility.exchange.checkpoints.task_class import task_of_classes
from facility.exchange.task_words import words_of


def task_of(archive: Archive, history: Iterable[RoundFile]) -> str:
    """The task that most facilities reported in these rounds; without any report, the initial model's.

    No single facility among several changes the words.
    """
    task = task_of_rows(row for entry in history for row in entry.facilities)
    return task or _of_model(archive)


def task_of_rows(rows: Iterable[FacilityRow]) -> str:
    """The task that most of these rows report; '' if none reports one, or none has a majority."""
    tasks = [row.task for row in rows if row.status == "ok"]
    found = Counter(words_of(task) for task in tasks if task).most_common(1)
    if not found or 2 * found[0][1] <= len(tasks):
        return ""
    return Counter(task for task in tasks if task and words_of(task) == found[0][0]).most_common(1)[0][0]


def _of_model(archive: Archive) -> str:
    config = model_file_if_any(archive.path / "initial" / "model")
    return task_of_classes(config.get("architectures")) if config else ""
