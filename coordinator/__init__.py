"""Everything that runs between facilities. Of `facility` it imports only `facility.exchange`."""
