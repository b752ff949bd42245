"""Encrypted files: the right key opens them, nothing else does, and no change goes unnoticed."""

from __future__ import annotations

import os
import secrets

import pytest

from raysessions import ConfigError, IntegrityError
from raysessions.encryption import SEGMENT_BYTES, EncryptionKey, seal, unseal

KEY = EncryptionKey(bytes(range(32)))
SIZES = [0, 1, 1000, SEGMENT_BYTES - 1, SEGMENT_BYTES, SEGMENT_BYTES + 1, 2 * SEGMENT_BYTES + 7]


def sealed(content: bytes, context: str = "here") -> bytes:
    return b"".join(seal(KEY, context, [content]))


@pytest.mark.parametrize("size", SIZES)
def test_what_is_sealed_opens_again(size):
    content = secrets.token_bytes(size)
    encrypted = sealed(content)
    assert unseal(KEY, "here", encrypted) == content
    assert size < 100 or content[:50] not in encrypted
    assert encrypted != sealed(content)  # another salt


def test_chunks_of_any_size_are_the_same_file():
    content = secrets.token_bytes(SEGMENT_BYTES + 100)
    chunks = [content[:3], content[3 : SEGMENT_BYTES - 5], b"", content[SEGMENT_BYTES - 5 :]]
    assert unseal(KEY, "here", b"".join(seal(KEY, "here", chunks))) == content


def test_another_key_another_name_and_any_change_are_noticed():
    content = secrets.token_bytes(2 * SEGMENT_BYTES + 7)
    encrypted = sealed(content)
    segment = SEGMENT_BYTES + 16
    first, second = encrypted[32 : 32 + segment], encrypted[32 + segment : 32 + 2 * segment]
    changed = [
        (EncryptionKey(bytes(32)), "here", encrypted),
        (KEY, "there", encrypted),
        (KEY, "here", encrypted[:-1]),
        (KEY, "here", encrypted[: 32 + 2 * segment]),  # the last segment dropped
        (KEY, "here", encrypted[:32]),
        (KEY, "here", b""),
        (KEY, "here", encrypted + b"x"),
        (KEY, "here", encrypted[:32] + second + first + encrypted[32 + 2 * segment :]),
        *((KEY, "here", _with_flipped_bit(encrypted, at)) for at in (0, 40, len(encrypted) // 2, len(encrypted) - 1)),
    ]
    for key, context, text in changed:
        with pytest.raises(IntegrityError, match=context):
            unseal(key, context, text)


def test_a_key_comes_from_bytes_a_variable_or_a_file(tmp_path, monkeypatch):
    secret = secrets.token_bytes(32)
    assert EncryptionKey.load(secret).secret == secret
    monkeypatch.setenv("RS_TEST_KEY", secret.hex())
    assert EncryptionKey.load("env:RS_TEST_KEY").secret == secret
    file = tmp_path / "key"
    file.write_bytes(secret)
    assert EncryptionKey.load(f"file:{file}").secret == secret
    file.write_text(secret.hex() + "\n")
    assert EncryptionKey.load(f"file:{file}").secret == secret
    assert secret.hex() not in repr(EncryptionKey(secret))
    assert str(secret) not in repr(EncryptionKey(secret))


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (b"short", "32 bytes"),
        ("env:RS_NOT_THERE", "RS_NOT_THERE"),
        ("file:/not/there", "cannot be read"),
        ("secret", "env:NAME"),
    ],
)
def test_what_is_no_key_is_refused(source, match):
    os.environ.pop("RS_NOT_THERE", None)
    with pytest.raises(ConfigError, match=match):
        EncryptionKey.load(source)


def _with_flipped_bit(text: bytes, at: int) -> bytes:
    changed = bytearray(text)
    changed[at] ^= 1
    return bytes(changed)
