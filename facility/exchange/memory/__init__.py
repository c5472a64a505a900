"""Memory of a rank, worked out from shapes: one law for the planner, the checks before a run and the trainer."""
