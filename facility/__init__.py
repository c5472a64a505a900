"""Everything that runs inside a facility. Imports nothing from `coordinator`; a facility installs only this package."""

from facility.exchange.interrupts import word_while_importing

__version__ = "0.2.0"

word_while_importing()
