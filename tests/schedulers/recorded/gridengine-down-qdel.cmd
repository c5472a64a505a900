# user alice, 2026-11-22T09:43:43Z
qdel 5
# exit code 1
