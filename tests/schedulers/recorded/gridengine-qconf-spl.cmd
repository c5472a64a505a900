# user alice, 2026-11-22T09:42:34Z
qconf -spl
# exit code 0
