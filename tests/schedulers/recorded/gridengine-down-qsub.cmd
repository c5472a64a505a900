# user alice, 2026-11-22T09:43:42Z
qsub -terse -N x code.sh 1 0
# exit code 1
