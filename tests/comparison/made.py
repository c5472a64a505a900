"""A comparison of made-up figures in an archive: every model on every facility's data."""

from __future__ import annotations

import random
from typing import Any

from coordinator.archive.rounds import Archive
from coordinator.comparison.account import Account, OwnTraining, write_account
from facility.exchange.messages.comparison import ALONE_OF, GLOBAL, INITIAL, UPDATE_OF


def add_comparison(archive: Archive, names: list[str], *, absent: str = "", masked: bool = False) -> Archive:
    """Models trained alone are good at home and bad elsewhere; the first facility has held-out data and tasks.

    `masked`: each facility evaluated its own models itself.
    """
    draw = random.Random(7)
    folders = [GLOBAL, INITIAL, *(f"{prefix}{name}" for prefix in (UPDATE_OF, ALONE_OF) for name in names)]
    here = [name for name in names if name != absent]

    def interval(value: float, width: float) -> dict[str, float]:
        return {"value": value, "low": value - width, "high": value + width}

    def figure(home: str, folder: str, held_out: bool) -> dict[str, Any]:
        losses = {GLOBAL: 2.0, INITIAL: 2.6, UPDATE_OF + home: 1.98, ALONE_OF + home: 2.1}
        value = (losses.get(folder, 2.2) if not held_out else 2.6 - losses.get(folder, 2.4) / 10) + draw.gauss(0, 0.02)
        others = {GLOBAL: [], INITIAL: [GLOBAL]}.get(folder, [GLOBAL, INITIAL])  # as the facilities' jobs tell
        return {
            "model": folder,
            "held_out": held_out,
            "loss": interval(value, 0.05),
            "blocks": 200,
            "predictions": 200_000,
            "against": {name: interval(value - losses[name], 0.01) for name in others},
        }

    def seen(home: str) -> list[str]:
        return [
            folder for folder in folders if not masked or folder in (*folders[:2], UPDATE_OF + home, ALONE_OF + home)
        ]

    figures = {
        name: [
            figure(name, folder, held)
            for held in ([False, True] if name == here[0] else [False])
            for folder in seen(name)
        ]
        for name in here
    }
    scores = [
        {"model": folder, "task": "arc_italian", "metric": "acc", "value": 0.3 + draw.random() / 10, "stderr": 0.012}
        for folder in seen(here[0])
    ]
    account = Account(
        after_round=len(archive.rounds()) - 1,
        alone={name: OwnTraining(rounds=3, of=3, tokens=3_000_000) for name in here},
        alone_over=True,
        over=True,
        figures=figures,
        tasks={here[0]: scores[:20]},
        gaps={absent: "not evaluated there: global, initial: its job was cancelled <script>alert(1)</script>"}
        if absent
        else {},
    )
    write_account(archive, account)
    return archive
