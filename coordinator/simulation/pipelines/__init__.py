"""One iteration of a pipelined layout: tasks, messages and the engines that time them."""
