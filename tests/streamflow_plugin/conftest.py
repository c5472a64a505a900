"""The sshd that the tests of logins share."""

from tests.streamflow_plugin.local_sshd import site as site
