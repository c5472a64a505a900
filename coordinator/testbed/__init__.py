"""Two real facilities on one machine: namespaces, sshd, munge and Slurm each (`python -m coordinator.testbed up`)."""
