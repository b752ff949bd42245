"""The registry on an S3 server (moto's), through pyarrow and through fsspec."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from registries import adapter, write
from waiting import wait_for

from raysessions import CheckpointNotFoundError, StorageError
from raysessions.adapter_weights import from_flat
from raysessions.encryption import EncryptionKey
from raysessions.registry import Registry
from raysessions.saved_adapter import read_adapter
from raysessions.storage_location import StorageLocation
from raysessions.uris import VersionUri

BUCKET = "runs"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"127.0.0.1:{port}"
    try:
        wait_for(lambda: _answers(address))
        urllib.request.urlopen(urllib.request.Request(f"http://{address}/{BUCKET}", method="PUT"))
        yield address
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def credentials(monkeypatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture(params=["pyarrow", "fsspec"])
def location(request, endpoint: str, credentials: None) -> StorageLocation:
    """A folder of its own in the bucket."""
    if request.param == "pyarrow":
        return StorageLocation(f"s3://{BUCKET}/arrow?endpoint_override={endpoint}&scheme=http&region=us-east-1")
    options = {
        "endpoint_url": f"http://{endpoint}",
        "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "alias/ours"},
    }
    return StorageLocation(f"s3://{BUCKET}/fsspec", options)


def test_versions_are_written_listed_read_and_deleted_on_s3(location):
    registry = Registry(location)
    uris = [write(registry, seed=number, kind="state" if number % 2 else "sampler") for number in range(11)]
    assert [uri.version for uri in uris] == list(range(1, 12))
    assert [found.path for found in registry.list("default")] == [str(uri) for uri in reversed(uris)]
    assert next(registry.list("default", kind="state")).path == str(uris[9])
    for number, uri in enumerate(uris):
        _, read = read_adapter(registry, uri)
        expected, got = from_flat(adapter(seed=number)), from_flat(read)
        assert all((got[name] == expected[name]).all() for name in expected)
    registry.delete(uris[0])
    registry.delete(uris[0])
    with pytest.raises(CheckpointNotFoundError):
        registry.read(uris[0])
    assert len(list(registry.list("default"))) == 10, "v1 is a prefix of v10 and v11"
    registry.set_ttl(uris[1], 1e-3)
    registry.sweep("default")
    assert [found.path for found in registry.list("default")] == [str(uri) for uri in reversed(uris[2:])]
    assert registry.groups() == ["default"]


def test_writers_at_the_same_time_get_different_numbers_on_s3(location):
    with ThreadPoolExecutor(4) as writers:
        numbers = list(writers.map(lambda _: [Registry(location).claim("shared").version for _ in range(4)], range(4)))
    everyone = [number for own in numbers for number in own]
    assert len(set(everyone)) == 16
    assert all(own == sorted(own) for own in numbers)


def test_an_encrypted_version_is_read_with_its_key_on_s3(location):
    key = EncryptionKey(bytes(range(32)))
    registry = Registry(StorageLocation(location.output_uri, location.options, key))
    uri = write(registry, group="secret")
    _, read = read_adapter(registry, uri)
    assert read.rank == 2
    assert next(Registry(location).list("secret")).encrypted


def test_a_missing_bucket_is_named_with_the_reason(location):
    uri = location.output_uri.replace(BUCKET, "no-such-bucket")
    with pytest.raises(StorageError, match="no-such-bucket"):
        write(Registry(StorageLocation(uri, location.options)))


def test_server_side_encryption_is_passed_through(endpoint, credentials):
    import s3fs

    options = {
        "endpoint_url": f"http://{endpoint}",
        "s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "alias/ours"},
    }
    uri = write(Registry(StorageLocation(f"s3://{BUCKET}/sse", options)))
    store = s3fs.S3FileSystem(endpoint_url=f"http://{endpoint}")
    told = store.call_s3("head_object", Bucket=BUCKET, Key=f"sse/versions/default/v{uri.version}/manifest.json")
    assert told["ServerSideEncryption"] == "aws:kms"
    assert told["SSEKMSKeyId"] == "alias/ours"


def test_no_version_of_one_group_is_seen_in_another(location):
    write(Registry(location), group="mine")
    with pytest.raises(CheckpointNotFoundError):
        Registry(location).read(VersionUri("min", 1))
    assert list(Registry(location).list("min")) == []


def _answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"http://{address}/moto-api/", timeout=1)
    except OSError:
        return False
    return True
