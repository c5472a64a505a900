# user alice, 2026-11-22T09:42:32Z
qstat -j 1 | head -40
# exit code 0
