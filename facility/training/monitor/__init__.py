"""What a rank reports while it trains: where a step's time goes, its log, a trace, trackers."""
