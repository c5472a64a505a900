# user alice, 2026-11-22T09:42:59Z
qdel 2
# exit code 0
