"""Typed events from a run's steps and connectors to its supervisor, in a private file."""
