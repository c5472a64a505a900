"""Who averages with whom, and when: pure state machines used on both sides."""
