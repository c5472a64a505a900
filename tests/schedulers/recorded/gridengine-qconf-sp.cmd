# user alice, 2026-11-22T09:49:39Z
qconf -sp smp
# exit code 0
