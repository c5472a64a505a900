"""Pipeline schedules, one file each, and the order in which each lets a rank compute."""
