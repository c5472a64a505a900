# user alice, 2026-11-22T09:42:32Z
qstat -u alice -r
# exit code 0
