#!/usr/bin/env bash
# torchrun on one node of several. Run it on each of them, with that node's rank:
#
#     NODES=2 NODE_RANK=0 MASTER_ADDR=node1 ./launch_torchrun.sh ../train_plain.py [ARGUMENTS]
#
# torchrun starts no other node and hands nothing on to one, so the variable is set here, for every node alike.
set -euo pipefail

export DS_GRADFIX=1

exec torchrun \
    --nnodes "${NODES:?how many nodes there are}" \
    --node_rank "${NODE_RANK:?which of them this is, from 0 on}" \
    --nproc_per_node "${GPUS_PER_NODE:-8}" \
    --master_addr "${MASTER_ADDR:?the name of node 0}" \
    --master_port "${MASTER_PORT:-29500}" \
    "$@"
