"""A script for DeepSpeed, unmodified: prints what each rank sees."""

import argparse
import os
import sys

import deepspeed
import torch
from deepspeed.ops.adam import FusedAdam

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()
deepspeed.init_distributed()
total = torch.ones(1)
deepspeed.comm.all_reduce(total)
model = torch.nn.Linear(2, 1)
engine, *_ = deepspeed.initialize(
    args, model, FusedAdam(model.parameters(), lr=0.5), config={"train_batch_size": 4}
)
engine.backward(engine(torch.ones(2, 2)).square().mean())
engine.step()
sys.stdout.write(
    f"rank {os.environ['RANK']} of {int(total)}: {args.local_rank} {deepspeed.__version__} "
    f"{engine.global_steps}\n"
)
