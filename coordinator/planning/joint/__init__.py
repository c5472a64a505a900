"""Joint search over grid, split, schedule and synchronisation."""
