"""Around StreamFlow: render its files, run it, supervise it, read and clean the queues it fills."""
