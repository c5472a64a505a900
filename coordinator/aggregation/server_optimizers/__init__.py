"""Server optimizers: how the aggregated step moves the global model. One file each."""
