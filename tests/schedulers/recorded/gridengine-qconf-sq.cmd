# user alice, 2026-11-22T09:42:35Z
qconf -sq all.q | head -70
# exit code 0
