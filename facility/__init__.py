"""Everything that runs inside a facility. Imports nothing from `coordinator`; a facility installs only this package."""

__version__ = "0.2.0"
