"""raysessions: training sessions for language models on your own Ray cluster.

import raysessions as rs

service = rs.ServiceClient()
with service.create_lora_training_client("smollm2-135m-instruct") as training:
    training.forward_backward(data).result()
    training.optim_step().result()
"""

from raysessions.cluster_overview import ServerCapabilities
from raysessions.config import SamplingConfig, TrainingConfig
from raysessions.datums import datum_for_rl, datum_for_supervised
from raysessions.errors import (
    BackPressureError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ClusterUnreachableError,
    ConfigError,
    DatumError,
    EmptyGradientError,
    IntegrityError,
    LossError,
    ModelNotFoundError,
    PlacementError,
    QuotaExceededError,
    RaySessionsError,
    RequestCancelledError,
    RequestTimeoutError,
    SamplerExpiredError,
    SamplingPoolError,
    SessionError,
    SessionExpiredError,
    SessionStoppedError,
    StorageError,
    TrainingGroupError,
    ValidationError,
)
from raysessions.future import APIFuture
from raysessions.losses import LOSSES, LossSpec, register_loss
from raysessions.network import NetworkConfig
from raysessions.responses import (
    CheckpointInfo,
    LoadStateResponse,
    OptimStepResponse,
    SaveStateResponse,
    SaveWeightsForSamplerResponse,
    SessionInfo,
)
from raysessions.sampling_client import SamplingClient
from raysessions.service_client import ServiceClient
from raysessions.session_summary import SessionSummary
from raysessions.settings import Settings
from raysessions.training_client import TrainingClient
from raysessions.types import (
    AdamParams,
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    ModelInput,
    SampledSequence,
    SampleResponse,
    SamplingParams,
    TensorData,
)
from raysessions.usage import AcceleratorTime, PriceTable, SessionUsage, Usage, UsageReport

__version__ = "0.1.0"

__all__ = [
    "LOSSES",
    "APIFuture",
    "AcceleratorTime",
    "AdamParams",
    "BackPressureError",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "ClusterUnreachableError",
    "ConfigError",
    "Datum",
    "DatumError",
    "EmptyGradientError",
    "EncodedTextChunk",
    "ForwardBackwardOutput",
    "IntegrityError",
    "LoadStateResponse",
    "LossError",
    "LossSpec",
    "ModelInput",
    "ModelNotFoundError",
    "NetworkConfig",
    "OptimStepResponse",
    "PlacementError",
    "PriceTable",
    "QuotaExceededError",
    "RaySessionsError",
    "RequestCancelledError",
    "RequestTimeoutError",
    "SampleResponse",
    "SampledSequence",
    "SamplerExpiredError",
    "SamplingClient",
    "SamplingConfig",
    "SamplingParams",
    "SamplingPoolError",
    "SaveStateResponse",
    "SaveWeightsForSamplerResponse",
    "ServerCapabilities",
    "ServiceClient",
    "SessionError",
    "SessionExpiredError",
    "SessionInfo",
    "SessionStoppedError",
    "SessionSummary",
    "SessionUsage",
    "Settings",
    "StorageError",
    "TensorData",
    "TrainingClient",
    "TrainingConfig",
    "TrainingGroupError",
    "Usage",
    "UsageReport",
    "ValidationError",
    "__version__",
    "datum_for_rl",
    "datum_for_supervised",
    "register_loss",
]
