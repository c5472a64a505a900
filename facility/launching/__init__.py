"""Starting the ranks of one node from what the scheduler's environment says, and watching over them."""
