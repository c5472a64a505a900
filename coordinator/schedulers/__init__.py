"""One module a scheduler: how its jobs are listed, cancelled, asked about, and what its answers mean."""
