"""The future that every verb returns: a Ray ObjectRef with `result`, `done`, `exception` and `cancel`."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError, TaskCancelledError

from raysessions.errors import RequestCancelledError, RequestTimeoutError, SessionError, SessionStoppedError

T = TypeVar("T")


class APIFuture(ray.ObjectRef, Generic[T]):
    """An ObjectRef, so `ray.get`, `ray.wait`, `await` and passing it to a remote function work on it too.

    `ray.get` raises Ray's RayTaskError; `result`, `await` and `exception` give the error itself.
    """

    _ref: ray.ObjectRef
    _cancel: Callable[[], bool] | None
    _look: Callable[[T], None] | None
    """Looks at the value when it is fetched here, to warn."""
    _explain: Callable[[], Exception] | None
    """Says what became of the session when its actors are gone."""

    def __new__(
        cls,
        ref: ray.ObjectRef,
        cancel: Callable[[], bool] | None = None,
        look: Callable[[T], None] | None = None,
        explain: Callable[[], Exception] | None = None,
    ) -> APIFuture[T]:
        return super().__new__(cls, ref.binary(), ref.owner_address(), ref.call_site())

    def __init__(
        self,
        ref: ray.ObjectRef,
        cancel: Callable[[], bool] | None = None,
        look: Callable[[T], None] | None = None,
        explain: Callable[[], Exception] | None = None,
    ) -> None:
        super().__init__(ref.binary(), ref.owner_address(), ref.call_site())
        self._ref = ref
        self._cancel = cancel
        self._look = look
        self._explain = explain

    def __reduce__(self) -> tuple[Any, ...]:
        # The original ref goes along: Ray counts references by it, and a copy made here would hang its receiver.
        return (APIFuture, (self._ref,))

    def result(self, timeout: float | None = None) -> T:
        """Waits and returns the value, or raises the operation's own error.

        `timeout` in seconds; when it passes, `RequestTimeoutError` is raised and the operation goes on.
        """
        _refuse_in_event_loop()
        try:
            value = ray.get(self._ref, timeout=timeout)
        except GetTimeoutError as error:
            raise RequestTimeoutError(
                f"Not finished within {timeout} s. The operation goes on: call result() again to wait longer."
            ) from error
        except RayError as error:
            raise self._own_error(error) from error
        if self._look is not None:
            self._look(value)
        return value

    def done(self) -> bool:
        """True once `result()` would return or raise at once."""
        ready, _ = ray.wait([self._ref], timeout=0, fetch_local=False)
        return bool(ready)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The operation's error, or None if it went well. Waits like `result`."""
        try:
            self.result(timeout)
        except RequestTimeoutError:
            raise
        except Exception as error:
            return error
        return None

    def cancel(self) -> bool:
        """True if the operation had not begun and now never will, or was a sample and is given up: `result()` then raises
        `RequestCancelledError`. False for an operation that runs or has ended.

        On a copy that was pickled to another process it does nothing and returns False.
        """
        return self._cancel() if self._cancel is not None else False

    def _own_error(self, error: RayError) -> BaseException:
        own = own_error(error)
        if isinstance(own, SessionStoppedError) and self._explain is not None:
            with contextlib.suppress(RayError):  # the manager is gone too
                return self._explain()
        return own

    def __await__(self) -> Generator[Any, None, T]:
        try:
            return (yield from self._ref.__await__())
        except RayError as error:
            raise own_error(error) from error

    def __repr__(self) -> str:
        return f"APIFuture({self.hex()[:16]}…, {'done' if self.done() else 'running'})"


def own_error(error: BaseException) -> BaseException:
    """What a Ray error means to the user: our error where an actor raised one, a sentence where Ray itself did."""
    if isinstance(error, RayTaskError):
        return own_error(error.cause) if isinstance(error.cause, RayError) else error.cause
    if isinstance(error, TaskCancelledError):
        return RequestCancelledError("Cancelled.")
    said = f"Ray says: {str(error).strip().partition(chr(10))[0]}"
    if isinstance(error, RayActorError):
        return SessionStoppedError(
            f"The session's actors are gone: it was stopped, or its process died. Create a new session. {said}"
        )
    return SessionError(f"Ray could not deliver the result: a node or its memory was lost. Call again. {said}")


def _refuse_in_event_loop() -> None:
    """Blocking inside a coroutine would stop its event loop, and often deadlock. A notebook cell may block: there the
    loop belongs to the kernel, which waits for the cell anyway."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if "ipykernel" not in sys.modules:
        raise RuntimeError(".result() would block the running event loop: use `await future` instead.")
