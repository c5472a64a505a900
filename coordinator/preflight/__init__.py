"""Preflight checks of `crossfed check`, one subject per module; each returns rows with a finding and a fix."""
