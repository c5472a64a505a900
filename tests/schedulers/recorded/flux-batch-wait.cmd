# flux-core 0.88.0, 2026-11-29
flux batch --wait sleep.sh
# exit code 2
