"""Files that appear atomically, hard-linked trees, paths of settings files."""
