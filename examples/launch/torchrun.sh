#!/usr/bin/env bash
# Start a program on several hosts. Run the same line on every host, in any order:
#
#     HOSTS=2 FIRST_HOST=node-0 bash torchrun.sh train.py --checkpoints /shared/runs/gpt
#
# FIRST_HOST is the name of any one of the hosts; the launchers meet there. After a fault torchrun
# starts all ranks again, and the program goes on from its newest checkpoint.
set -euo pipefail

exec torchrun \
    --nnodes "${HOSTS:?how many hosts, such as 2}" \
    --nproc-per-node "${RANKS_PER_HOST:-gpu}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "${FIRST_HOST:?the name of one host}:${PORT:-29500}" \
    --rdzv-id "${RUN:-zfun}" \
    --max-restarts "${MAX_RESTARTS:-3}" \
    "$@"
