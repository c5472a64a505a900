"""What the engine logs, as a list of sentences."""

from __future__ import annotations

import logging

from coordinator.engine.console_log import ENGINE


class Collected(logging.Handler):
    """Appends each message to a list."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def engine_messages(into: list[str] | None = None) -> list[str]:
    """The engine's messages from now on, in a new list or at the end of `into`; an earlier call's list gets no more."""
    logger = logging.getLogger(ENGINE)
    for handler in [one for one in logger.handlers if isinstance(one, Collected)]:
        logger.removeHandler(handler)
    collected = Collected([] if into is None else into)
    logger.addHandler(collected)
    logger.setLevel(logging.INFO)
    return collected.messages
