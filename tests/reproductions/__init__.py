"""Published baselines that no product path runs, with their tests."""
