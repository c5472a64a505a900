# user alice, 2026-11-22T09:42:33Z
qstat -g c
# exit code 0
