# user alice, 2026-11-22T09:49:38Z
qacct -j 1
# exit code 0
