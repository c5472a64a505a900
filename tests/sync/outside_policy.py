"""A user's own policy, in a module that is not part of the package: parameters are averaged every few steps."""

from __future__ import annotations

from typing import Any

from facility.exchange.registry import Parameter
from facility.exchange.scheduling.policies import SyncPolicy
from facility.sync.runtime.replica import Replica

DECLARATION = SyncPolicy(
    name="sparse_average",
    summary="average parameters every `interval` steps",
    implementation="SparseAverage",
    parameters=(Parameter(name="interval", default=2, at_least=1, text="Steps between two averages."),),
    synchronous=True,
)


class SparseAverage(Replica):
    """Everybody averages after every `interval`-th step."""

    def after_step(self, samples: float) -> None:
        self.count(samples)
        values: dict[str, Any] = self.settings.declaration.values(self.settings.parameters)
        if self.done % values["interval"] == 0:
            self.averaged(self.ask("ready"), vote=False)
