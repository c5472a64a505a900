# user alice, 2026-11-22T09:42:33Z
qstat -j 999
# exit code 1
