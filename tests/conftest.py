"""One local Ray, one training host and one sampling engine for all tests of a session."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_model import make_tiny_model

# The tests' own mathematics and the actors' share two cores.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("RAY_ADDRESS", None)

# A home of their own, with the models of the user's.
_home = Path(tempfile.mkdtemp(prefix="raysessions-home-"))
atexit.register(shutil.rmtree, _home, ignore_errors=True)
(_home / "models").symlink_to(Path(os.environ.get("RAYSESSIONS_HOME", "~/.raysessions")).expanduser() / "models")
os.environ["RAYSESSIONS_HOME"] = str(_home)

REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of two layers, float32, context 512, and a byte tokenizer."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def service() -> Iterator:  # type: ignore[type-arg]
    """A ServiceClient on a local Ray."""
    import raysessions as rs

    with rs.ServiceClient() as service:
        yield service


@pytest.fixture(scope="session")
def resident(service, tiny_model: Path):  # type: ignore[no-untyped-def]
    """A session that lives as long as the tests, so that the others find host and sampler running."""
    with service.create_lora_training_client(str(tiny_model), rank=8, seed=1, name="resident") as training:
        training.create_sampling_client()
        yield training


@pytest.fixture(scope="session")
def pooled_service(service, resident, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """A ServiceClient whose sessions share a pool of two replicas, which lives as long as the tests. It can scale to three:
    memory has no room for more."""
    import ray
    from pools import NO_CPU, POOL, TRAINING

    import raysessions as rs

    options = {**NO_CPU, "memory": int(0.3 * ray.cluster_resources()["memory"])}
    with (
        rs.ServiceClient(
            output_uri=str(tmp_path_factory.mktemp("registry")),
            training=TRAINING,
            sampling=POOL.model_copy(update={"actor_options": options}),
        ) as pooled,
        pooled.create_lora_training_client(str(tiny_model), rank=4, seed=1, name="pooled") as training,
    ):
        training.create_sampling_client()
        yield pooled


@pytest.fixture(scope="session")
def gateway(service, resident, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """A served gateway, and a ServiceClient whose sessions its key reaches."""
    from clusters import free_port
    from gateways import TENANT, ServedGateway
    from pools import NO_CPU, TRAINING

    import raysessions as rs
    from raysessions.gateway import serving
    from raysessions.gateway.config import GatewayConfig
    from raysessions.gateway.keys import KeyStore
    from raysessions.storage_location import StorageLocation

    output_uri, port, base_model = str(tmp_path_factory.mktemp("gateway")), free_port(), str(tiny_model)
    sampling = rs.SamplingConfig(kv_cache_gib=0.25, max_num_seqs=16, actor_options=NO_CPU)
    key, _ = KeyStore(StorageLocation(output_uri)).create(TENANT)
    config = GatewayConfig(output_uri=output_uri, base_models=(base_model,), training=TRAINING, sampling=sampling)
    with rs.ServiceClient(tenant=TENANT, output_uri=output_uri, training=TRAINING, sampling=sampling) as own:
        serving.start(config, "127.0.0.1", port)
        yield ServedGateway(f"http://127.0.0.1:{port}", key, own, base_model, output_uri)
        serving.stop()


@pytest.fixture(scope="module")
def sdk(gateway) -> Iterator[None]:  # type: ignore[no-untyped-def]
    """The tinker package without telemetry. What its clients leave running is stopped: its older versions say nothing when they
    end, and their runs would end in the midst of other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_TELEMETRY", "0")
        yield
    for session in gateway.service.list_sessions():
        if session.name.startswith("tinker-"):
            gateway.service.stop_session(session.name)


@pytest.fixture
def training(service, resident, tiny_model: Path):  # type: ignore[no-untyped-def]
    """A fresh session on the resident host: LoRA rank 8, seed 0."""
    with service.create_lora_training_client(str(tiny_model), rank=8, seed=0) as training:
        yield training


@pytest.fixture(scope="session")
def engine_factory(tiny_model: Path):  # type: ignore[no-untyped-def]
    """Makes DeepSpeed engines in the test's own process, without Ray."""
    import socket

    import torch

    from raysessions import TrainingConfig
    from raysessions.actors.engines.deepspeed import DeepSpeedEngine
    from raysessions.actors.protocol import Seat

    torch.set_num_threads(2)

    def make(**config):  # type: ignore[no-untyped-def]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return DeepSpeedEngine(tiny_model, TrainingConfig(**config), Seat(0, 1, 0, 1, "127.0.0.1", port))

    return make


@pytest.fixture(params=["one replica", "two replicas"])
def owner_by_replicas(request: pytest.FixtureRequest, service, resident):  # type: ignore[no-untyped-def]
    """A ServiceClient whose sessions are sampled by one replica, or by two."""
    return request.getfixturevalue("pooled_service") if request.param == "two replicas" else service


@pytest.fixture
def training_by_replicas(owner_by_replicas, tiny_model: Path):  # type: ignore[no-untyped-def]
    """A fresh session like `training`."""
    with owner_by_replicas.create_lora_training_client(str(tiny_model), rank=8, seed=0) as training:
        yield training


@pytest.fixture
def create(service, resident, tiny_model: Path):  # type: ignore[no-untyped-def]
    """Creates sessions on the resident host, or another if the arguments say so; stops them afterwards."""
    created = []

    def create(base_model: str = str(tiny_model), **arguments):
        created.append(service.create_lora_training_client(base_model, **arguments))
        return created[-1]

    yield create
    for training in created:
        training.stop()
