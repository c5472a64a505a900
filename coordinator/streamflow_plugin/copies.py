"""Where data lies: a step of a facility finds that facility's copy at once, whatever other facilities hold.

StreamFlow enters a copy beside its original and goes through all copies whenever it looks for either. A model has one
at every facility, and every facility's steps look for it several times a round.
"""

from __future__ import annotations

import posixpath
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import PurePosixPath
from typing import Any

from streamflow.core.data import DataLocation, DataType
from streamflow.data.manager import _RemotePathMapper

destinations: ContextVar[tuple[str, ...]] = ContextVar("destinations", default=())
"""Deployments whose own copies count in what is looked for now."""


@contextmanager
def going_to(*deployments: str) -> Iterator[None]:
    """Copies at these deployments are found as well."""
    token = destinations.set(deployments)
    try:
        yield
    finally:
        destinations.reset(token)


class Copies(_RemotePathMapper):
    """StreamFlow's table of paths, and beside it the copies that were sent."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._sent: dict[tuple[str, str], list[DataLocation]] = defaultdict(list)

    def put_sent(self, path: str, copy: DataLocation) -> None:
        """Note a copy of `path` at another deployment."""
        known = self._sent[posixpath.normpath(path), copy.deployment]
        if all((one.path, one.name) != (copy.path, copy.name) for one in known):
            known.append(copy)

    def forget(self, directory: str) -> None:
        """Take what was sent to below `directory` of a facility for not sent: it came there in part, or not at all.

        StreamFlow enters a copy before it is made, and leaves it there when that fails. Whatever looks for the same
        file or directory later waits for that copy without end, or links to what stands at its place.
        """
        node = self._filesystem
        for token in PurePosixPath(directory).parts:
            if (node := node.children.get(token)) is None:
                return
        nodes = [node]
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            for copies in [one for names in node.locations.values() for one in names.values()]:
                for copy in [one for one in copies if PurePosixPath(one.path).is_relative_to(directory)]:
                    copy.data_type = DataType.INVALID
                    copy.available.set()

    def get(
        self, path: str, data_type: DataType | None = None, deployment: str | None = None, name: str | None = None
    ) -> list[DataLocation]:
        """As in the original; of copies that were sent, those at `deployment`, without one at the `destinations`."""
        found = list(super().get(path, data_type=data_type, deployment=deployment, name=name))
        for place in destinations.get() if deployment is None else (deployment,):
            found += [
                one
                for one in self._sent.get((posixpath.normpath(path), place), ())
                if (data_type is None or one.data_type == data_type) and (name is None or one.name == name)
            ]
        return found
