"""The console that a command prints tables on, and what it says meanwhile. It knows nothing of what is printed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console

REPORT_SECONDS = 10.0
"""Between two lines of a command that has nothing else to say."""
SAME = 3
"""As many of these times between two lines that are alike: a log should not fill with one sentence."""


class SentenceConsole(Console):
    """Breaks no sentence into lines where that would break a path or a command in it: whoever copies it from a terminal
    gets it whole, and a file or pipe has one line of each. Tables are laid out as ever."""

    def print(self, *objects: Any, soft_wrap: bool | None = None, **options: Any) -> None:
        if soft_wrap is None and all(isinstance(one, str) for one in objects):
            longest = max((len(word) for one in objects for word in one.split()), default=0)
            soft_wrap = longest > self.width or not self.is_terminal
        super().print(*objects, soft_wrap=soft_wrap, **options)


def command_console(width: int, stream: TextIO | None = None) -> Console:
    """A console on `stream`, else on standard output; `:name:` in a table stays text.

    `width`: in characters, where standard output is not a terminal and so has none.
    """
    return SentenceConsole(file=stream, width=None if sys.stdout.isatty() else width, emoji=False)


def on_stderr(text: str) -> None:
    """Print a line on standard error at once."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def reported_meanwhile(sentence: Callable[[], str], tell: Callable[[str], None] = on_stderr) -> Iterator[None]:
    """Give `tell` the sentence of that moment every `REPORT_SECONDS`, unless it is empty, until the block ends, which
    an interrupt ends at once; one that has not changed, every `SAME` times as long. Both are called in a thread of
    their own."""
    end = threading.Event()

    def report_regularly() -> None:
        before, since = "", 0
        while not end.wait(REPORT_SECONDS):
            text = sentence()
            since = since + 1 if text == before else SAME
            if since == SAME:
                since = 0
                if text:
                    tell(text)
            before = text

    threading.Thread(target=report_regularly, daemon=True).start()
    try:
        yield
    finally:
        end.set()
