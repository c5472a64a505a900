# user alice, 2026-11-22T09:43:42Z
qstat -u alice
# exit code 1
