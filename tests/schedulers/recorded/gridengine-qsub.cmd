# user alice, 2026-11-22T09:42:27Z
qsub -terse -N crossfed-f-a -j y -o /home/alice/o1 -pe smp 1 code.sh 25 7
# exit code 0
