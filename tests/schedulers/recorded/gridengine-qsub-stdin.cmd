# user alice, 2026-11-22T09:42:27Z
printf '#!/bin/bash\nsleep 25; exit 0\n' | qsub -terse -N crossfed-f-b -j y -o /home/alice/o2
# exit code 0
