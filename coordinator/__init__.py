"""Everything that runs between facilities. Of `facility` it imports only `facility.exchange`."""

from facility.exchange.interrupts import word_while_importing

word_while_importing()
