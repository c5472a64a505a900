"""One permission among the schedulers of a pipeline's stages: only one of them holds pipelines back at a time."""

from __future__ import annotations

import torch.distributed as dist

HOLDER = "holder"


class Permission:
    """Asked by a scheduler that would make somebody wait (`GroupScheduler.may_hold`)."""

    def __init__(self, store: dist.Store, name: str) -> None:
        self._store, self._name = store.clone(), name  # type: ignore[attr-defined]  # used by the scheduler's thread
        self._held = False

    def __call__(self, wanted: bool) -> bool:
        """`wanted`: take the permission if nobody has it; else give it back. Do we have it?"""
        if wanted != self._held:
            expected, desired = ("", self._name) if wanted else (self._name, "")
            self._held = self._store.compare_set(HOLDER, expected, desired) == self._name.encode()
        return self._held
