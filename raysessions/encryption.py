"""Encryption of saved files: AES-256-GCM in segments, each file under a key of its own.

File = salt (32 bytes) | segment | segment | … Each segment is 4 MiB of content (the last one less) and a tag of 16 bytes. The
file's key is HKDF-SHA256(key, salt, context), so that a file moved to another name does not open; a segment's nonce is its
number and whether it is the last, so that none can be dropped, repeated or swapped (the STREAM construction of Hoang,
Reyhanitabar, Rogaway & Vizár 2015).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from raysessions.errors import ConfigError, IntegrityError

KEY_BYTES = 32
_SALT_BYTES = 32
_TAG_BYTES = 16
SEGMENT_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class EncryptionKey:
    """A key of AES-256."""

    secret: bytes = field(repr=False)

    @property
    def key_id(self) -> str:
        """Names the key without giving it away."""
        return hashlib.sha256(b"raysessions key id" + self.secret).hexdigest()[:16]

    @classmethod
    def load(cls, source: bytes | str) -> EncryptionKey:
        """From 32 bytes, `env:NAME` or `file:PATH`; the variable or file holds 32 bytes, or these as hex or base64."""
        if isinstance(source, bytes):
            return cls(_decoded(source, "encryption_key"))
        kind, _, where = source.partition(":")
        if kind == "env" and where:
            if where not in os.environ:
                raise ConfigError(
                    f"encryption_key={source!r}: there is no environment variable {where}. Set it, or use file:PATH."
                )
            return cls(_decoded(os.environb[where.encode()], source))
        if kind == "file" and where:
            try:
                return cls(_decoded(Path(where).expanduser().read_bytes(), source))
            except OSError as error:
                raise ConfigError(f"encryption_key={source!r} cannot be read: {error}.") from error
        raise ConfigError("encryption_key: give 32 bytes, 'env:NAME' or 'file:PATH'.")


def seal(key: EncryptionKey, context: str, chunks: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """The encrypted file, piece by piece. `context` names the file; it must be the same to open it."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    salt = secrets.token_bytes(_SALT_BYTES)
    cipher = AESGCM(_file_key(key, salt, context))
    yield salt
    held: bytes | memoryview = b""
    number = 0
    for segment in _segments(chunks):
        if number:
            yield cipher.encrypt(_nonce(number - 1, is_last=False), held, None)
        held = segment
        number += 1
    yield cipher.encrypt(_nonce(max(number - 1, 0), is_last=True), held, None)


def unseal(key: EncryptionKey, context: str, content: bytes | memoryview) -> bytes:
    """The file that `seal` encrypted. Raises `IntegrityError` for another key, another name or a changed byte."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    view = memoryview(content)
    cipher = AESGCM(_file_key(key, bytes(view[:_SALT_BYTES]), context))
    stride = SEGMENT_BYTES + _TAG_BYTES
    begins = range(_SALT_BYTES, len(view), stride)
    try:
        if not begins:
            raise InvalidTag
        return b"".join(
            cipher.decrypt(_nonce(number, is_last=begin + stride >= len(view)), view[begin : begin + stride], None)
            for number, begin in enumerate(begins)
        )
    except InvalidTag:
        raise IntegrityError(
            f"{context} does not open with this encryption_key: it is another one, or the file was changed. Give the key it "
            "was "
            "saved with, or use another version."
        ) from None


def _segments(chunks: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """The chunks cut anew, into SEGMENT_BYTES each but for the last."""
    held = bytearray()
    for chunk in chunks:
        view = memoryview(chunk)
        while len(view):
            part = view[: SEGMENT_BYTES - len(held)]
            held += part
            view = view[len(part) :]
            if len(held) == SEGMENT_BYTES:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)


def _file_key(key: EncryptionKey, salt: bytes, context: str) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), KEY_BYTES, salt, f"raysessions {context}".encode()).derive(key.secret)


def _nonce(number: int, *, is_last: bool) -> bytes:
    return number.to_bytes(11, "big") + bytes([is_last])


def _decoded(text: bytes, source: str) -> bytes:
    if len(text) == KEY_BYTES:
        return text
    stripped = text.strip()
    for decode in (bytes.fromhex, lambda text: base64.b64decode(text, validate=True)):
        try:
            key = decode(stripped.decode("ascii"))
        except (ValueError, binascii.Error):
            continue
        if len(key) == KEY_BYTES:
            return key
    raise ConfigError(
        f"{source}: a key is 32 bytes, or these as 64 hex digits or as base64. Make one with `openssl rand -hex 32`."
    )
