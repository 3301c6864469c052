#!/usr/bin/env bash
# DeepSpeed's own launcher over the nodes in the file hostfile. Run it once, on one of them:
#
#     ./launch_deepspeed.sh ../train_plain.py [ARGUMENTS]
#
# It needs pdsh, and ssh without a password to every node. ds-gradfix must be installed on all of them: ranks that have
# it and ranks that do not are an error at engine initialisation.
set -euo pipefail

# ds-gradfix has the launcher hand this on, and every DS_GRADFIX_* beside it, whichever runner it uses.
export DS_GRADFIX=1

exec deepspeed --hostfile "${HOSTFILE:-$(dirname "$0")/hostfile}" --master_port "${MASTER_PORT:-29500}" "$@"
