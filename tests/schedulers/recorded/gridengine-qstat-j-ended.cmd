# user alice, 2026-11-22T09:43:32Z
qstat -j 1
# exit code 1
