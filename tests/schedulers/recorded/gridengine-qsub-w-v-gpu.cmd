# user alice, 2026-11-23T12:54:09Z
qsub -w v -cwd -N crossfed-check-a < gpu.sh
# exit code 1
