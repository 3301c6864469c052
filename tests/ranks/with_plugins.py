"""An engine in a process where plug-ins are installed: what is in force for it, and what it gives and trains."""

import json
import os

import deepspeed
import torch
from engines import config, engine

import ds_gradfix

torch.distributed.init_process_group("gloo", init_method=os.environ["RENDEZVOUS"], rank=0, world_size=1)
deepspeed.init_distributed("gloo", verbose=False)
made = engine(config(zero_optimization={"stage": 1}), mpu=None)
info = [str(number) if callable(number) else number for number in made.get_batch_info()]
made.backward(made(torch.ones(1, 4)).sum())
made.step()
status = ds_gradfix.status()
print(
    json.dumps(
        {
            "info": info,
            "plugins": {entry["patch"]: entry["plugin"] for entry in status["plan"] if entry["plugin"]},
            "built-in": sum(entry["plugin"] is None for entry in status["plan"]),
            "in force": status["engines"][0]["patches"],
            "steps": made.global_steps,
        }
    )
)
