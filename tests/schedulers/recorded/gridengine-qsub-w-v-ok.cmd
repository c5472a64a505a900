# user alice, 2026-11-23T12:54:06Z
qsub -w v -cwd -N crossfed-check-a < ok.sh
# exit code 0
