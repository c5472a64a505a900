# user alice, 2026-11-22T09:43:33Z
qacct -j 2
# exit code 0
