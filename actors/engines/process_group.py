"""The ranks of a training group: how they meet, and what they say to each other."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from raysessions.actors.protocol import Seat

SHARED_BUFFERS = Path("/dev/shm")


class ProcessGroup:
    """DeepSpeed's process group. With one rank nothing is ever sent."""

    def __init__(self, seat: Seat, device: torch.device) -> None:
        import deepspeed

        self.world_rank = seat.world_rank
        self.world_size = seat.world_size
        self._device = device
        # Ray shows an actor only its own GPUs, so that a rank's is the first it sees.
        local_rank = seat.local_rank % torch.cuda.device_count() if device.type == "cuda" else seat.local_rank
        os.environ.update(
            MASTER_ADDR=seat.master_addr,
            MASTER_PORT=str(seat.master_port),
            RANK=str(seat.world_rank),
            WORLD_SIZE=str(seat.world_size),
            LOCAL_RANK=str(local_rank),
            LOCAL_SIZE=str(seat.local_size),
        )
        if device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        deepspeed.init_distributed("gloo" if device.type == "cpu" else "nccl", verbose=False)
        dist.barrier()  # every rank of this machine has mapped the others' buffers
        _unlink_shared_buffer()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` summed over the ranks, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_slices(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the sum of `whole` over the ranks; its length must be a multiple of their number."""
        if self.world_size == 1:
            return whole
        own = whole.new_empty(len(whole) // self.world_size)
        dist.reduce_scatter_tensor(own, whole)
        return own

    def gather_slices(self, whole: torch.Tensor) -> None:
        """Puts every rank's slice of `whole` in its place."""
        if self.world_size > 1:
            dist.all_gather_into_tensor(whole, self.own_slice(whole).clone())

    def own_slice(self, whole: torch.Tensor) -> torch.Tensor:
        """A view of this rank's slice."""
        size = len(whole) // self.world_size
        return whole[self.world_rank * size : (self.world_rank + 1) * size]

    def any(self, happened: bool) -> bool:
        """Whether it happened on any rank."""
        if self.world_size == 1:
            return happened
        return bool(self.sum(torch.tensor([float(happened)], device=self._device)).item())


def _unlink_shared_buffer() -> None:
    """DeepSpeed leaves the 66 MiB through which ranks on CPU reduce in shared memory for good. Without its name, it goes
    with the processes, also with killed ones."""
    environment = os.environ
    name = "_".join(["deepspeed_allreduce_buffer", str(os.getuid()), environment["MASTER_ADDR"], environment["MASTER_PORT"]])
    (SHARED_BUFFERS / f"{name}_{environment['RANK']}").unlink(missing_ok=True)
