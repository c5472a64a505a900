"""StreamFlow's database, where the run wants it: each run has its own, so that two federations of one account can run.

The original's lies in the account's home and is locked while a run lives.
"""

from __future__ import annotations

import os
from typing import Any

from streamflow.core.context import StreamFlowContext
from streamflow.persistence.sqlite import SqliteDatabase

from coordinator.streamflow_plugin.names import DATABASE


class PrivateDatabase(SqliteDatabase):
    """`database: {type: sqlite}`, the same settings."""

    def __init__(self, context: StreamFlowContext, **settings: Any) -> None:
        if path := os.environ.get(DATABASE):
            settings.setdefault("connection", path)
            os.close(os.open(settings["connection"], os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
        super().__init__(context, **settings)
        if path and path == self.connection.connection:
            self.connection.init_db = True
