"""Synchronisation policies, one file each."""
