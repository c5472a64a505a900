# user alice, 2026-11-22T09:42:33Z
qconf -sql
# exit code 0
