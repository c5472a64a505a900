"""Aggregation rules: how the updates of a round become one step. One file each."""
