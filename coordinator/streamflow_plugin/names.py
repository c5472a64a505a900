"""Environment variables that the plug-in reads; a separate module, since importing the plug-in needs StreamFlow."""

DATABASE = "CROSSFED_DATABASE"
"""Path of this run's database; unset: StreamFlow's own place."""
