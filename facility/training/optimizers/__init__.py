"""Inner optimizers, one file each: `training.optimizer` names one."""
