"""What `import raysessions` gives, and how little it takes."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import raysessions
from raysessions import errors

REPOSITORY = Path(__file__).parent.parent

PUBLIC_NAMES = [
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
    "LOSSES",
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

HEAVY = ["deepspeed", "peft", "torch", "transformers", "vllm"]

IMPORT_AND_TELL = f"""
import json, sys, time
started = time.process_time()
import raysessions
seconds = time.process_time() - started
print(json.dumps([seconds, [name for name in {HEAVY} if name in sys.modules], "ray" in sys.modules]))
"""


def test_the_public_names_are_pinned():
    assert sorted(raysessions.__all__) == PUBLIC_NAMES


def test_every_public_name_can_be_imported():
    assert [name for name in raysessions.__all__ if getattr(raysessions, name, None) is None] == []
    names: dict[str, object] = {}
    exec("from raysessions import *", names)
    assert names.keys() - {"__builtins__"} == set(PUBLIC_NAMES)


def test_every_error_is_public():
    classes = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    assert {name for name in PUBLIC_NAMES if name.endswith("Error")} == classes.keys()
    assert [name for name, cls in classes.items() if getattr(raysessions, name) is not cls] == []


def test_importing_the_library_is_quick_and_loads_no_engine():
    runs = []
    for _ in range(3):
        told = subprocess.run(
            [sys.executable, "-c", IMPORT_AND_TELL], cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=60
        )
        runs.append(json.loads(told.stdout))
    assert [heavy for _, heavy, _ in runs] == [[], [], []]
    assert all(has_ray for _, _, has_ray in runs)
    assert statistics.median(seconds for seconds, _, _ in runs) < 1.5
