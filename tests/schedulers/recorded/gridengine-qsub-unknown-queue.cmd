# user alice, 2026-11-22T09:42:28Z
qsub -terse -q nosuch.q code.sh 1 0
# exit code 1
