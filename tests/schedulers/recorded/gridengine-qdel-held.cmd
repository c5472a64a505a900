# user alice, 2026-11-22T09:42:59Z
qdel 3
# exit code 0
