"""Which members average together, and when: pure state machines used on both sides."""
