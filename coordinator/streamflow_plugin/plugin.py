"""The plug-in that `streamflow run` finds by its entry point: its connectors take the place of StreamFlow's `ssh`,
`slurm`, `pbs` and `flux`, with the same settings, so that a rendered streamflow.yml also runs where this package is not installed."""

from __future__ import annotations

from streamflow.ext.plugin import StreamFlowPlugin

from coordinator.streamflow_plugin.pbs_flux import CarefulFluxConnector, CarefulPBSConnector
from coordinator.streamflow_plugin.slurm import CarefulSlurmConnector
from coordinator.streamflow_plugin.ssh import ParallelSSHConnector


class CrossFedPlugin(StreamFlowPlugin):
    def register(self) -> None:
        self.register_connector("ssh", ParallelSSHConnector)
        self.register_connector("slurm", CarefulSlurmConnector)
        self.register_connector("pbs", CarefulPBSConnector)
        self.register_connector("flux", CarefulFluxConnector)
