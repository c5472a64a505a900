# user alice, 2026-11-22T09:42:27Z
qsub -terse -h -N crossfed-f-h -j y -o /home/alice/o3 code.sh 1 0
# exit code 0
