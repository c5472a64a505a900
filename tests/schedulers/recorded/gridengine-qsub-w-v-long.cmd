# user alice, 2026-11-23T12:54:15Z
qsub -w v -cwd -N crossfed-check-a < long.sh
# exit code 1
