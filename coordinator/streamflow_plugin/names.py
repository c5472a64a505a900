"""Environment variables that the plug-in reads; a module of its own, since the plug-in needs StreamFlow to be imported."""

DATABASE = "CROSSFED_DATABASE"
"""Path of this run's database; unset: StreamFlow's own place."""
