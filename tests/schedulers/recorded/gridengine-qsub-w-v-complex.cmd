# user alice, 2026-11-23T12:54:22Z
qsub -w v -cwd -N crossfed-check-a < complex.sh
# exit code 1
