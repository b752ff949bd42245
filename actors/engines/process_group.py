"""Joining the ranks of a training group, through DeepSpeed."""

from __future__ import annotations

import os
from pathlib import Path

import torch

SHARED_BUFFERS = Path("/dev/shm")


def join(device: torch.device, master_port: int) -> None:
    """Sets up DeepSpeed's communication: one rank for now."""
    import deepspeed

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(master_port), RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_SIZE="1"
    )
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    deepspeed.init_distributed("gloo" if device.type == "cpu" else "nccl", verbose=False)
    torch.distributed.barrier()  # every rank of this machine has mapped the others' buffers
    _unlink_shared_buffer()


def _unlink_shared_buffer() -> None:
    """DeepSpeed leaves the 66 MiB through which ranks on CPU reduce in shared memory for good. Without its name, it goes
    with the processes, also with killed ones."""
    environment = os.environ
    name = "_".join(["deepspeed_allreduce_buffer", str(os.getuid()), environment["MASTER_ADDR"], environment["MASTER_PORT"]])
    (SHARED_BUFFERS / f"{name}_{environment['RANK']}").unlink(missing_ok=True)
