"""One law of memory: what planner, checks and trainer say of it."""
