# user alice, 2026-11-23T12:54:27Z
qacct -j 1
# exit code 0
