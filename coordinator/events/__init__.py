"""What a run's steps and connectors tell its supervisor: typed events in a private file, not sentences in a log."""
