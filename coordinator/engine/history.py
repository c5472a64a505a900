"""The rounds of a running federation as its display needs them several times a second: each round file is read once."""

from __future__ import annotations

from coordinator.archive import task
from coordinator.archive.rounds import Archive, RoundFile
from facility.exchange.task_words import TaskWords, words_of


class History:
    """The complete rounds of one archive, each read once.

    A complete round's file does not change, and no round goes while a run holds the federation.
    """

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._rounds: list[RoundFile] = []
        self._words: TaskWords | None = None

    def rounds(self) -> list[RoundFile]:
        """Complete rounds, oldest first."""
        if new := self._archive.rounds()[len(self._rounds) :]:
            self._rounds += map(self._archive.read_round, new)
            self._words = None
        return list(self._rounds)

    def words(self) -> TaskWords:
        """Words for the task that most facilities reported so far, else for the one that the model is made for.

        They are kept once a task is known: a new archive is asked before the initial model is in it.
        """
        rounds = self.rounds()
        if self._words is None:
            found = task.task_of(self._archive, rounds)
            if not found:
                return words_of(found)
            self._words = words_of(found)
        return self._words
