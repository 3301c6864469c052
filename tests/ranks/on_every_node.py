"""Says whether ds-gradfix is on in this rank, and what it left out there."""

import os

import deepspeed  # noqa: F401

import ds_gradfix

status = ds_gradfix.status()
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {status['enabled']} {status['settings']['exclude']}")
