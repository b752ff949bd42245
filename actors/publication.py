"""From exported weights to a version that samplers answer from and the registry keeps."""

from __future__ import annotations

from typing import Any

import ray

from raysessions.actors.answer import answer
from raysessions.actors.hosted_session import HostedSession
from raysessions.actors.merging import write_merged_version
from raysessions.errors import SamplingPoolError
from raysessions.operations import SaveForSamplerOp
from raysessions.responses import CheckpointKind, SaveWeightsForSamplerResponse
from raysessions.storage_location import StoredUri
from raysessions.uris import VersionUri

REFRESH_TTL_S = 7 * 24 * 3600.0
"""The last refreshes of a session that ended stay so long: nobody else would delete them."""

POOL_DIED = SamplingPoolError("The samplers ended while they were given the new version.")


async def publish(
    pool: Any, session: HostedSession, op: SaveForSamplerOp, uri: VersionUri, weights: ray.ObjectRef, step: int
) -> SaveWeightsForSamplerResponse:
    """Returns when every replica has the version, and the registry too; but for a refresh, which the registry gets behind the
    samples."""
    checkpoints = session.checkpoints
    ttl_seconds = REFRESH_TTL_S if op.is_refresh else op.ttl_seconds
    kind: CheckpointKind = "merged" if op.merge_weights else "sampler"
    info = checkpoints.describe(kind, op.name, step, ttl_seconds, op.user_metadata)
    published = pool.publish.remote(
        StoredUri(uri, checkpoints.location), session.session_id, (weights,), session.facts.num_modules
    )
    await answer(published, if_dead=POOL_DIED)
    if op.merge_weights:
        await write_merged_version(checkpoints.location, uri, info, weights)
    elif op.is_refresh:
        checkpoints.write_behind(uri, info, weights)
    else:
        await checkpoints.write_adapter(uri, info, await weights)
    return SaveWeightsForSamplerResponse(path=str(uri), version=uri.version, name=op.name)
