"""Placement of a pipeline x data-parallel grid on an unequal network."""
