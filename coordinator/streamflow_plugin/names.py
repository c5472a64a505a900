"""Environment variables that the plug-in reads; a separate module, since importing the plug-in needs StreamFlow."""

DATABASE = "CROSSFED_DATABASE"
"""Path of this run's database; unset: StreamFlow's own place."""
PROGRESS_SECONDS = "CROSSFED_PROGRESS_SECONDS"
"""Seconds between two looks at a running job's progress file; unset or 0: nobody watches."""
LOGINS = "CROSSFED_LOGINS"
"""Directory in which `crossfed login` leaves a file named after the facility whose login it has just tested."""
