"""A StreamFlow plug-in: models travel over several connections, large files through the system's ssh, and arrive whole or not at
all; Slurm is asked carefully. See `coordinator.streamflow_plugin.plugin`."""
