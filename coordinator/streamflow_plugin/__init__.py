"""A StreamFlow plug-in: atomic transfers over several connections, large files through the system's ssh, and reliable
queue queries. See `coordinator.streamflow_plugin.plugin`."""
