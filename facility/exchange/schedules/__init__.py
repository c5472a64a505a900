"""Pipeline schedules, one file each, and the order in which a rank computes under each."""
