"""Versions on storage: what is listed can be read, and what is read is what was written. Conformance E4 and parts of E7."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from registries import adapter, info, write
from transformers import AutoModelForCausalLM

from raysessions import CheckpointNotFoundError, ConfigError, IntegrityError, StorageError
from raysessions.adapter_weights import WEIGHTS_FILE, from_flat, to_peft_files
from raysessions.config import LoraConfig
from raysessions.encryption import EncryptionKey
from raysessions.registry import MANIFEST, VERSIONS, Registry
from raysessions.saved_adapter import read_adapter
from raysessions.storage import Storage
from raysessions.storage_location import StorageLocation
from raysessions.uris import VersionUri

KEY = EncryptionKey(bytes(range(32)))


def open_registry(folder, key: EncryptionKey | None = None) -> Registry:
    return Registry(StorageLocation(str(folder), key=key))


@pytest.fixture(params=["plain", "encrypted"])
def registry(request, tmp_path) -> Registry:
    return open_registry(tmp_path, KEY if request.param == "encrypted" else None)


def folder_of(tmp_path: Path, uri: VersionUri) -> Path:
    return tmp_path / VERSIONS / uri.group / f"v{uri.version}"


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_a_version_is_read_as_it_was_written(registry, dtype):
    written = adapter(dtype)
    uri = registry.claim("runs")
    told = registry.write(uri, info(expires_at=time.time() + 60), to_peft_files(written, "base").items())
    read_info, read = read_adapter(registry, uri)
    assert read_info == told
    assert (told.path, told.step, told.user_metadata) == ("raysessions://runs/v1", 3, {"why": "a test"})
    assert told.num_bytes > written.flat.nbytes
    assert (read.rank, read.alpha, read.target_modules, read.num_modules) == (2, 16.0, ("k", "q"), 2)
    assert read.dtype == written.dtype
    expected, got = from_flat(written), from_flat(read)
    assert got.keys() == expected.keys()
    assert all(np.array_equal(got[name], expected[name]) for name in expected)


def test_a_uri_of_a_filesystem_is_understood(tmp_path):
    uri = write(Registry(StorageLocation(f"file://{tmp_path}/there")))
    assert open_registry(tmp_path / "there").info(uri).rank == 2
    through_fsspec = Registry(StorageLocation(f"file://{tmp_path}/there", {"auto_mkdir": True}))
    assert through_fsspec.info(uri).rank == 2
    assert write(through_fsspec).version == 2


def test_numbers_go_up_in_each_group_by_itself_and_are_not_used_again(registry):
    assert [str(write(registry, group)) for group in ("a", "a", "b", "a")] == [
        f"raysessions://{name}" for name in ("a/v1", "a/v2", "b/v1", "a/v3")
    ]
    for version in (1, 2, 3):
        registry.delete(VersionUri("a", version))
    assert write(registry, "a").version == 4
    assert registry.groups() == ["a", "b"]


def test_writers_at_the_same_time_get_different_numbers(tmp_path):
    """Threads with a registry each, as if they were processes that know nothing of each other."""
    with ThreadPoolExecutor(8) as writers:
        numbers = list(writers.map(lambda _: [open_registry(tmp_path).claim("shared").version for _ in range(12)], range(8)))
    assert all(own == sorted(own) for own in numbers)
    everyone = [number for own in numbers for number in own]
    assert len(set(everyone)) == len(everyone) == 96
    assert len(list((tmp_path / VERSIONS / "shared" / ".numbers").iterdir())) < 10


def test_versions_are_listed_newest_first_by_kind_and_session(registry):
    kinds = ["sampler", "state", "sampler", "sampler", "state"] * 3
    uris = [write(registry, kind=kind, session_id=f"s{i % 2}") for i, kind in enumerate(kinds)]
    assert [found.path for found in registry.list("default")] == [str(uri) for uri in reversed(uris)]
    states = [str(uri) for uri, kind in zip(uris, kinds, strict=True) if kind == "state"]
    assert [found.path for found in registry.list("default", kind="state")] == states[::-1]
    assert {found.session_id for found in registry.list("default", session_id="s1")} == {"s1"}
    assert list(registry.list("nothing-here")) == []


def test_a_version_that_is_not_there_half_written_or_deleted_is_not_found(registry, tmp_path):
    uri = registry.claim("default")
    with pytest.raises(CheckpointNotFoundError, match="default/v1"):
        registry.read(uri)
    uri = write(registry)
    (folder_of(tmp_path, uri) / MANIFEST).unlink()  # as if its writer had been killed
    with pytest.raises(CheckpointNotFoundError):
        registry.read(uri)
    assert list(registry.list("default")) == []
    uri = write(registry)
    registry.delete(uri)
    registry.delete(uri)
    with pytest.raises(CheckpointNotFoundError):
        registry.read(uri)


def test_deleting_a_version_touches_no_other(registry):
    uris = [write(registry, seed=number) for number in range(12)]
    registry.delete(uris[0])  # v1, of which v10, v11 and v12 begin with the same letters
    assert len(list(registry.list("default"))) == 11
    assert all(read_adapter(registry, uri) for uri in uris[1:])


def test_a_changed_byte_is_noticed(registry, tmp_path):
    uri = write(registry)
    for name in (WEIGHTS_FILE, MANIFEST):
        file = folder_of(tmp_path, uri) / name
        before = file.read_bytes()
        at = len(before) - 1 if name == WEIGHTS_FILE else before.index(b'"base"') + 2
        file.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
        if name == MANIFEST and registry._key is None:
            file.write_bytes(before)  # unsigned: a checksum guards the files, nothing guards what is said of them
            continue
        with pytest.raises(IntegrityError):
            registry.read(uri)
        file.write_bytes(before)
    assert registry.read(uri)


def test_a_version_put_in_anothers_place_is_noticed(registry, tmp_path):
    one, two = write(registry, seed=1), write(registry, seed=2)
    (folder_of(tmp_path, one) / WEIGHTS_FILE).write_bytes((folder_of(tmp_path, two) / WEIGHTS_FILE).read_bytes())
    with pytest.raises(IntegrityError):
        registry.read(one)
    (folder_of(tmp_path, one) / MANIFEST).write_bytes((folder_of(tmp_path, two) / MANIFEST).read_bytes())
    with pytest.raises(IntegrityError):
        registry.read(one)


def test_an_encrypted_version_is_listed_without_its_key_and_read_with_it_only(tmp_path):
    uri = write(open_registry(tmp_path, KEY))
    (listed,) = open_registry(tmp_path).list("default")
    assert listed.encrypted
    assert listed.path == str(uri)
    with pytest.raises(IntegrityError, match="give the encryption_key"):
        open_registry(tmp_path).read(uri)
    with pytest.raises(IntegrityError, match="another encryption_key"):
        open_registry(tmp_path, EncryptionKey(bytes(32))).read(uri)
    content = (folder_of(tmp_path, uri) / WEIGHTS_FILE).read_bytes()
    assert b"lora_A" not in content
    assert adapter().flat[:8].tobytes() not in content
    plain = write(open_registry(tmp_path))
    with pytest.raises(IntegrityError, match="without encryption"):
        open_registry(tmp_path, KEY).read(plain)


def test_a_version_whose_time_is_over_is_gone(registry, tmp_path):
    short, long, changed = write(registry, expires_at=time.time() + 0.5), write(registry), write(registry)
    registry.set_ttl(changed, 0.5)
    assert registry.info(changed).expires_at == pytest.approx(time.time() + 0.5, abs=0.3)
    assert registry.info(short)
    time.sleep(0.8)
    for uri in (short, changed):
        with pytest.raises(CheckpointNotFoundError):
            registry.read(uri)
    assert [found.path for found in registry.list("default")] == [str(long)]
    assert folder_of(tmp_path, short).exists()
    registry.sweep("default")
    assert not folder_of(tmp_path, short).exists()
    registry.set_ttl(long, 1000)
    registry.set_ttl(long, None)
    assert registry.info(long).expires_at is None
    with pytest.raises(ConfigError, match="ttl_seconds is -1"):
        registry.set_ttl(long, -1)


def test_what_a_killed_writer_left_is_swept_after_a_day_and_not_before(registry, tmp_path):
    uri = write(registry)
    folder = folder_of(tmp_path, uri)
    (folder / MANIFEST).unlink()
    registry.sweep("default")
    assert folder.exists()
    for file in folder.iterdir():
        os.utime(file, (time.time() - 90_000,) * 2)
    registry.sweep("default")
    assert not folder.exists()


KILLED_WRITER = """
import sys, numpy as np
from registries import write
from raysessions.registry import Registry
from raysessions.storage_location import StorageLocation
registry = Registry(StorageLocation(sys.argv[1]))
print("ready", flush=True)
while True:
    write(registry)
"""


def test_a_writer_killed_at_any_moment_leaves_no_version_that_is_listed_and_not_read(tmp_path):
    for delay_s in (0.0, 0.003, 0.01, 0.017, 0.03):
        writer = subprocess.Popen(
            [sys.executable, "-c", KILLED_WRITER, str(tmp_path)], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        time.sleep(delay_s)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        registry = open_registry(tmp_path)
        listed = [VersionUri.parse(found.path) for found in registry.list("default")]
        for uri in listed:
            read_adapter(registry, uri)
        assert write(registry).version > max((uri.version for uri in listed), default=0)


def test_a_file_that_several_threads_write_is_always_whole(tmp_path):
    storage = Storage(StorageLocation(str(tmp_path)))
    storage.write("a/file", [b"x" * 100_000])

    def write(letter: bytes) -> None:
        for _ in range(50):
            storage.write("a/file", [letter * 50_000, letter * 50_000])

    with ThreadPoolExecutor(4) as threads:
        writers = [threads.submit(write, letter) for letter in (b"a", b"b", b"c", b"d")]
        while not all(writer.done() for writer in writers):
            read = bytes(storage.read("a/file"))
            assert read == read[:1] * 100_000
        for writer in writers:
            writer.result()
    assert [info.base_name for info in storage.list("a")] == ["file"]


def test_storage_that_cannot_be_written_is_named_with_the_reason(tmp_path):
    (tmp_path / "a-file").write_text("in the way")
    with pytest.raises(StorageError, match=r"a-file.*Not a directory"):
        write(open_registry(tmp_path / "a-file"))
    with pytest.raises(ConfigError, match="nosuchscheme"):
        open_registry("nosuchscheme://bucket")


def test_a_full_disk_leaves_nothing_of_the_version(registry, tmp_path):
    write(registry)

    def files():
        yield "first", b"x" * 1000
        raise OSError(28, "No space left on device")

    uri = registry.claim("default")
    with pytest.raises(OSError, match="No space left"):
        registry.write(uri, info(), files())
    assert not folder_of(tmp_path, uri).exists()
    assert len(list(registry.list("default"))) == 1


def test_the_files_are_a_peft_folder_that_peft_loads(engine_factory, tiny_model, tmp_path):
    engine = engine_factory()
    engine.add_session("s", LoraConfig(rank=8, alpha=16, seed=3))
    engine._adapters["s"].weights.data.normal_(0, 0.05, generator=torch.Generator().manual_seed(5))
    exported = engine.export_adapter("s")
    for name, content in to_peft_files(exported, str(tiny_model)).items():
        (tmp_path / name).write_bytes(content)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), tmp_path)
    state = {name.replace(".default", ""): value for name, value in model.state_dict().items() if "lora_" in name}
    expected = from_flat(exported)
    assert state.keys() == expected.keys()
    assert all(np.array_equal(state[name].numpy(), expected[name]) for name in expected)
    assert model.peft_config["default"].lora_alpha == 16
    assert model.peft_config["default"].base_model_name_or_path == str(tiny_model)
