"""Running statistics of batch normalisation among the tensors of a checkpoint, by their names.

They are averages of what a layer saw and not weights that descend: their aggregate is the mean over facilities, and no
server optimizer moves them, whose momentum could carry a variance below zero.
"""

from __future__ import annotations

VARIANCE = ".running_var"
AVERAGED = (".running_mean", VARIANCE)
"""Ends of names."""
PATTERNS = ("*.running_mean", "*.running_var", "*.num_batches_tracked")
"""Of all that belongs to them: the counter is a whole number, which no rule averages."""


def is_running_statistic(name: str) -> bool:
    """Whether a tensor of that name is a running mean or variance of batch norm."""
    return name.endswith(AVERAGED)
