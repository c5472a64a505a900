"""What a round reports of itself: time, memory, progress, traces, trackers."""
