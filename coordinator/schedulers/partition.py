"""What a scheduler offers, read from its own listings: partitions (or queues) and what one job may ask of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from facility.exchange.text import number_of

WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:/@+=%-]{0,99}")
"""Names allowed in a scheduler's directive; a site's answer with any other name is not used."""
MOST = 10_000_000


@dataclass(frozen=True, kw_only=True)
class Partition:
    """One partition or queue."""

    name: str
    default: bool = False
    open: bool = True
    """It accepts jobs and starts them."""
    nodes: int = 0
    """0: not known; the same for the next three."""
    cores: int = 0
    """Cores of one node; 0: not known."""
    gpus: int = 0
    """Of one node; 0: none."""
    hours: float = 0.0
    """Longest job; 0: no limit, or not known."""
    environment: str = ""
    """Grid engine: a parallel environment of it that keeps a job's slots on one host."""
    allowed: frozenset[str] = frozenset()
    """Accounts that may use it; empty: all."""

    def describe(self) -> str:
        """The figures for a reader."""
        parts = [number_of(self.nodes, "node")] if self.nodes else []
        parts += [number_of(self.cores, "core")] if self.cores else []
        parts += [f"{number_of(self.gpus, 'GPU')} a node"] if self.gpus else []
        parts += [f"up to {self.hours:g} h"] if self.hours else []
        return ", ".join(parts) + ("" if self.open else "; closed")


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a facility's jobs ask for: one node, all of it."""

    partition: str = ""
    account: str = ""
    """Empty: the scheduler wants none."""
    cores: int = 1
    gpus: int = 0
    hours: float = 2.0
    environment: str = ""
    """Parallel environment, as `Partition` has it."""

    @property
    def clock(self) -> str:
        """`hours` as HH:MM:SS."""
        minutes = max(1, round(self.hours * 60))
        return f"{minutes // 60:02}:{minutes % 60:02}:00"


def first_number(text: str) -> int:
    """The first whole number in a site's text, bounded; 0 where there is none."""
    found = re.search(r"\d{1,12}", text)
    return min(int(found[0]), MOST) if found else 0


def allowed_words(text: str, separator: str | None = None) -> list[str]:
    """The words of a site's text that are allowed in a directive; others are left out."""
    return [word for word in (part.strip() for part in text.split(separator)) if WORD.fullmatch(word)]
