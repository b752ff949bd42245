"""What a ServiceClient and each of its sessions can be told, in one list: a call's word beats the client's, which beats the
default."""

from __future__ import annotations

import getpass
import re
from collections.abc import Mapping
from typing import Any, TypedDict

from pydantic import Field, field_validator

from raysessions.config import SamplingConfig, TrainingConfig
from raysessions.encryption import EncryptionKey
from raysessions.errors import ConfigError
from raysessions.network import NetworkConfig
from raysessions.operations import Limits, SaveSettings
from raysessions.storage_location import StorageLocation
from raysessions.types import TypedModel
from raysessions.uris import check_name


class SettingsKeywords(TypedDict, total=False):
    """The keywords of `ServiceClient` and of every `create_*`. Their meaning stands at `Settings`."""

    tenant: str
    model_package_group: str
    output_uri: str | None
    storage_options: Mapping[str, Any]
    encryption_key: bytes | str | None
    keep_refreshes: int | None
    user_metadata: Mapping[str, str]
    session_name_prefix: str
    idle_timeout_s: float | None
    max_lifetime_s: float | None
    lease_s: float
    network: NetworkConfig
    training: TrainingConfig | None
    sampling: SamplingConfig | None


class Settings(TypedModel):
    """Defaults for sessions."""

    tenant: str = Field(default_factory=lambda: _as_name(getpass.getuser()))
    """Whose quota and ledger the sessions count against. Default: the user of the operating system."""
    model_package_group: str = "default"
    """The group of the registry that saves become versions of; created on first use."""
    output_uri: str | None = None
    """Where versions are kept: a folder that the cluster's nodes see, or a URI that pyarrow or fsspec knows (file, s3, gs,
    hdfs, …). None: `$RAYSESSIONS_HOME`, or `~/.raysessions`, on the cluster."""
    storage_options: Mapping[str, Any] = Field(default_factory=dict, repr=False)
    """For fsspec, which then opens `output_uri` instead of pyarrow. For s3 (needs s3fs): `{"s3_additional_kwargs":
    {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": …}}` has the server encrypt too."""
    encryption_key: bytes | str | None = Field(default=None, repr=False)
    """Encrypts every saved file before it leaves the cluster (AES-256-GCM): 32 bytes, "env:NAME" or "file:PATH". Names, sizes
    and `user_metadata` of versions stay readable, and signed."""
    keep_refreshes: int | None = Field(default=8, ge=1)
    """How many of a session's newest versions by `save_weights_and_get_sampling_client` the registry keeps, None: all; each for
    a week at most. What other calls save is kept until it is deleted or its time to live ends."""
    user_metadata: Mapping[str, str] = Field(default_factory=dict)
    """Goes with every saved version."""
    session_name_prefix: str = "session"
    """Of the names that are made up for sessions."""
    idle_timeout_s: float | None = Field(default=None, gt=0)
    """Stops a session after so long without an operation or a sample (`SessionExpiredError`). None: never."""
    max_lifetime_s: float | None = Field(default=None, gt=0)
    """Stops a session so long after its creation. None: never."""
    lease_s: float = Field(default=3600.0, gt=0)
    """Stops a detached session after so long without any client: one that is open renews the lease by itself."""
    network: NetworkConfig = NetworkConfig()
    training: TrainingConfig = TrainingConfig()
    sampling: SamplingConfig = SamplingConfig()

    @field_validator("tenant", "model_package_group", "session_name_prefix")
    @classmethod
    def _is_a_name(cls, name: str) -> str:
        try:
            return check_name(name, "A name")
        except ConfigError as error:
            raise ValueError(str(error)) from error

    def but(self, keywords: SettingsKeywords) -> Settings:
        """These settings with those of a call. Raises `ConfigError` for an unknown keyword."""
        given = {name: value for name, value in keywords.items() if value is not None or name not in ("training", "sampling")}
        metadata = {**self.user_metadata, **(keywords.get("user_metadata") or {})}
        return type(self)(**{**dict(self), **given, "user_metadata": metadata})

    @property
    def saves(self) -> SaveSettings:
        return SaveSettings(self.location, self.model_package_group, self.tenant, dict(self.user_metadata), self.keep_refreshes)

    def limits(self, *, detached: bool = False) -> Limits:
        return Limits(self.idle_timeout_s, self.max_lifetime_s, self.lease_s if detached else None)

    @property
    def location(self) -> StorageLocation:
        key = None if self.encryption_key is None else EncryptionKey.load(self.encryption_key)
        return StorageLocation(self.output_uri, self.storage_options, key)


def _as_name(user: str) -> str:
    return re.sub(r"[^a-z0-9_-]+", "-", user.lower()).strip("-_")[:64] or "user"
