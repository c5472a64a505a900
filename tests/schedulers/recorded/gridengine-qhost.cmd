# user alice, 2026-11-22T09:42:34Z
qhost -F
# exit code 0
