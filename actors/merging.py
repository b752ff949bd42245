"""Writing merged weights to the registry, in a process of its own: it needs torch and the base model's files, and takes minutes
for a large one."""

from __future__ import annotations

import itertools

import ray

from raysessions.actors.answer import answer
from raysessions.adapter_weights import AdapterWeights
from raysessions.errors import SessionError
from raysessions.models import local_folder
from raysessions.responses import CheckpointInfo
from raysessions.storage_location import StorageLocation
from raysessions.uris import VersionUri

DIED = SessionError("The process that merged the weights died, perhaps for want of memory. Save again.")


async def write_merged_version(
    location: StorageLocation, uri: VersionUri, info: CheckpointInfo, weights: ray.ObjectRef
) -> None:
    await answer(_write.remote(location, uri, info, weights), if_dead=DIED)


@ray.remote(num_cpus=0, max_retries=0)
def _write(location: StorageLocation, uri: VersionUri, info: CheckpointInfo, weights: AdapterWeights) -> None:
    from raysessions.actors.engines.merged_weights import merged_files
    from raysessions.saved_adapter import beside_merged_weights

    files = merged_files(local_folder(info.base_model), weights)
    location.open_registry().write(uri, info, itertools.chain(files, beside_merged_weights(weights, info.base_model)))
