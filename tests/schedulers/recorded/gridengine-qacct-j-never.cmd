# user alice, 2026-11-22T09:43:34Z
qacct -j 3
# exit code 1
