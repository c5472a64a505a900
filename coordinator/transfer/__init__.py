"""A StreamFlow plug-in: models travel over several ssh connections and arrive whole or not at all; Slurm is asked
carefully. See `coordinator.transfer.plugin`."""
