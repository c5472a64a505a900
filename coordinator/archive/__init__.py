"""What outlives a run: the archive of complete rounds, and what is read out of it: tables, totals, earlier states."""
