"""Every error that raysessions raises on purpose. Each message says what to do next.

RaySessionsError
├── ValidationError                  the call is wrong; nothing was sent or applied
│   ├── DatumError                   a datum: names its index and key
│   ├── LossError                    an unknown loss, or an unknown or wrong loss_fn_config
│   └── ConfigError                  an argument or a config field
├── SessionError                     the session cannot do it
│   ├── SessionStoppedError          it was stopped
│   │   └── SessionExpiredError      by its idle time-out, its lifetime or its lease
│   ├── QuotaExceededError           too many sessions run: names them
│   ├── PlacementError               the cluster has not the resources or the memory
│   ├── TrainingGroupError           a training rank died or failed
│   ├── SamplingPoolError            the samplers failed, or did not take an adapter
│   │   └── BackPressureError        too many requests wait for a sampler
│   ├── SamplerExpiredError          the sampler's version has been retired
│   └── EmptyGradientError           optim_step with nothing accumulated
├── CheckpointError                  a saved version cannot be used
│   ├── CheckpointNotFoundError      there is none
│   ├── CheckpointMismatchError      it is of another base model, or of another LoRA shape
│   ├── IntegrityError               it is not as it was written, or under another key
│   └── StorageError                 the storage failed: names the path and the reason
├── ClusterUnreachableError          no Ray cluster answers at the address
├── RequestTimeoutError              not finished in time
├── RequestCancelledError            cancelled before it ran
└── ModelNotFoundError               no such base model
"""

from __future__ import annotations


class RaySessionsError(Exception):
    """Base of all errors of this library. One message, so that it survives pickling through Ray."""


class ValidationError(RaySessionsError, ValueError):
    """The call is wrong; nothing was sent or applied."""


class DatumError(ValidationError):
    """A datum cannot be trained on; the message names its index and key."""


class LossError(ValidationError):
    """Unknown loss, or unknown or wrong `loss_fn_config`."""


class ConfigError(ValidationError):
    """An argument or a config field that cannot be honoured."""


class SessionError(RaySessionsError):
    """The session cannot do what was asked."""


class SessionStoppedError(SessionError):
    """The session was stopped, by `stop()`, by leaving its `with` block, or with its driver."""


class SessionExpiredError(SessionStoppedError):
    """The session was stopped by its idle time-out, its maximum lifetime, or because nobody renewed its lease."""


class QuotaExceededError(SessionError):
    """As many sessions run as the tenant or the cluster may have; the message names them."""


class PlacementError(SessionError):
    """The cluster has not the resources, or the node not the memory."""


class TrainingGroupError(SessionError):
    """A training rank died or failed."""


class SamplingPoolError(SessionError):
    """The samplers failed and could not be brought back, or they did not take an adapter."""


class BackPressureError(SamplingPoolError):
    """Too many requests wait for a sampler; this one was not taken."""


class SamplerExpiredError(SessionError):
    """The version this client is pinned to has been retired."""


class EmptyGradientError(SessionError):
    """`optim_step` was called with no gradient accumulated."""


class CheckpointError(RaySessionsError):
    """A saved version cannot be used."""


class CheckpointNotFoundError(CheckpointError):
    """There is no such version."""


class CheckpointMismatchError(CheckpointError):
    """The version is of another base model, or of another LoRA shape."""


class IntegrityError(CheckpointError):
    """A file is not as it was written, or was encrypted with another key."""


class StorageError(CheckpointError):
    """The storage failed; the message names the path and the reason."""


class ClusterUnreachableError(RaySessionsError, ConnectionError):
    """No Ray cluster answers at the given address."""


class RequestTimeoutError(RaySessionsError, TimeoutError):
    """Not finished in the given time. After `result(timeout)` the operation goes on and its result stays retrievable; a sample
    that outlives `SamplingConfig.request_timeout_s` is given up."""


class RequestCancelledError(RaySessionsError):
    """Cancelled before it ran; nothing was applied."""


class ModelNotFoundError(RaySessionsError):
    """No such base model."""
