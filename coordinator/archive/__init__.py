"""What outlives a run: the archive of complete rounds, its summary and its HTML report."""
