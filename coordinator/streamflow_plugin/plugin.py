"""The plug-in that `streamflow run` finds by its entry point.

Its connectors take the place of StreamFlow's `local`, `ssh`, `slurm`, `pbs`, `flux` and whatever else
`coordinator.schedulers` finds, with the same settings, so that a rendered streamflow.yml also runs where this package
is not installed.
"""

from __future__ import annotations

from importlib.util import find_spec

from streamflow.ext.plugin import StreamFlowPlugin

from coordinator.config.firecrest import API
from coordinator.schedulers.registry import schedulers
from coordinator.schedulers.scheduler import BatchScheduler
from coordinator.streamflow_plugin import database, engine_folder, facility_steps, garbage, many_steps
from coordinator.streamflow_plugin.ahead_queue import connector_for
from coordinator.streamflow_plugin.database import PrivateDatabase
from coordinator.streamflow_plugin.gate import GatedSSHConnector
from coordinator.streamflow_plugin.local import TellingLocalConnector
from coordinator.streamflow_plugin.ssh import ParallelSSHConnector
from coordinator.streamflow_plugin.system_ssh import SystemSSHConnector
from coordinator.streamflow_plugin.waiting_jobs import FirstComeScheduler


class CrossFedPlugin(StreamFlowPlugin):
    def register(self) -> None:
        facility_steps.install()
        many_steps.install()
        garbage.look_less_often()
        database.install()
        engine_folder.install()
        self.register_scheduler("default", FirstComeScheduler)
        self.register_data_manager("default", facility_steps.CarefulDataManager)
        self.register_connector("ssh", ParallelSSHConnector)
        self.register_connector("gate", GatedSSHConnector)
        self.register_connector("system-ssh", SystemSSHConnector)
        if find_spec("firecrest") is not None:
            from coordinator.streamflow_plugin.firecrest import FirecrestConnector

            self.register_connector(API, FirecrestConnector)
        self.register_connector("local", TellingLocalConnector)
        for name in ("default", "sqlite"):
            self.register_database(name, PrivateDatabase)
        for scheduler in schedulers().values():
            if isinstance(scheduler, BatchScheduler):
                self.register_connector(scheduler.name, connector_for(scheduler))
