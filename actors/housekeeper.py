"""What the manager does by itself every few seconds: it asks hosts and pools what their sessions did, keeps the ledger, and
ends sessions whose time is over."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable

from raysessions.actors.cluster_metrics import ClusterMetrics
from raysessions.actors.manager_records import ManagerRecords, SessionRecord, SharedActor
from raysessions.actors.protocol import PoolStatus
from raysessions.actors.usage_meter import ActivityReport
from raysessions.errors import RaySessionsError
from raysessions.session_summary import SessionState
from raysessions.usage import AcceleratorTime, Usage

log = logging.getLogger("raysessions")

EVERY_S = 2.0
LEDGER_EVERY_S = 30.0
"""Between writes to the storage; also when a session ends, and when somebody asks for the usage."""
ANSWER_S = 5.0
"""How long an actor may take to report before it is asked the next time instead: it may be coming back."""

_STATES: dict[str, SessionState] = {"placing": "placing", "loading": "placing", "ready": "running", "recovering": "recovering"}
"""Of a session, by the phase of its host or pool."""


class Housekeeper:
    """Lives in the manager, on its event loop."""

    def __init__(self, records: ManagerRecords, expire: Callable[[SessionRecord, str], Awaitable[None]]) -> None:
        self._records = records
        self._expire = expire
        self._reports: dict[str, ActivityReport] = {}
        """The last one of each actor that runs, by its name."""
        self._totals: defaultdict[str, dict[str, Usage]] = defaultdict(dict)
        """Of each session, by count: those of processes that died too."""
        self._unwritten: set[str] = set()
        """Sessions whose totals the ledger has not."""
        self._writing = asyncio.Lock()
        self._metrics = ClusterMetrics()

    async def run(self) -> None:
        written_at = time.monotonic()
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look_around()
            await self._measure()
            for record in list(self._records.sessions.values()):
                reason = _why_it_is_over(record)
                if reason is not None and record.state != "stopping":
                    await self._expire(record, reason)
            if time.monotonic() - written_at > LEDGER_EVERY_S:
                await self.write_ledger()
                written_at = time.monotonic()

    async def look_around(self) -> None:
        """Brings states, times and totals up to date."""
        shared = [*self._records.hosts.values(), *self._records.pools.values()]
        await asyncio.gather(*map(self._ask, shared))
        running = {actor.name for actor in shared}
        self._reports = {name: report for name, report in self._reports.items() if name in running}
        for record in self._records.sessions.values():
            if record.state in ("placing", "running", "recovering") and record.info is not None:
                report = self._reports.get(self._records.shared(record).name)
                record.state = _STATES[report.phase] if report is not None else record.state

    async def look_at(self, record: SessionRecord) -> None:
        """Brings one session's line in the ledger up to date."""
        keys = ((self._records.hosts, record.host_key), (self._records.pools, record.pool_key))
        await asyncio.gather(*(self._ask(table[key]) for table, key in keys if key in table))
        await self.write_ledger()

    async def write_ledger(self) -> None:
        """What has changed. A storage that fails is tried again the next time."""
        async with self._writing:  # a file is read, added to and written
            await self._write_ledger()

    async def _write_ledger(self) -> None:
        for session_id in list(self._unwritten):
            record = self._records.sessions.get(session_id) or self._records.ended.get(session_id)
            if record is not None:
                saves, totals = record.saves, dict(self._totals[session_id])
                try:
                    await asyncio.to_thread(
                        saves.location.open_ledger().write, session_id, saves.tenant, record.base_model, totals
                    )
                except (RaySessionsError, OSError) as error:
                    log.warning("raysessions: the ledger could not be written, it will be tried again: %s", error)
                    continue
                if totals != self._totals[session_id]:  # it went on meanwhile
                    continue
            self._unwritten.discard(session_id)
            if session_id not in self._records.sessions:
                del self._totals[session_id]

    def accelerators(self) -> list[AcceleratorTime]:
        """What those that run now have done."""
        times = []
        for what, table in (("training", self._records.hosts), ("sampling", self._records.pools)):
            for key, shared in table.items():
                if (report := self._reports.get(shared.name)) is not None and report.placed_s:
                    name = f"{what}, {key.partition(chr(10))[0]}"
                    times.append(AcceleratorTime(name, report.busy_s, max(0.0, report.placed_s - report.busy_s)))
        return times

    async def _ask(self, shared: SharedActor) -> None:
        try:
            report: ActivityReport = await asyncio.wait_for(shared.actor.report.remote(), ANSWER_S)
        except Exception as error:  # it comes back or is being stopped: ask again
            log.debug("raysessions: %s did not report: %s", shared.name, error)
            return
        self._reports[shared.name] = report
        now = time.time()
        for session_id, idle_s in report.idle_s.items():
            if (record := self._records.sessions.get(session_id)) is not None:
                record.used_at = max(record.used_at, now - idle_s)
        for session_id, (count, usage) in report.usage.items():
            before = self._totals[session_id].get(count, Usage())
            if before != usage:
                self._totals[session_id][count] = usage
                self._unwritten.add(session_id)
                if (record := self._records.sessions.get(session_id)) is not None:
                    self._metrics.used(record.saves.tenant, record.base_model, before, usage)

    async def _measure(self) -> None:
        """Ray's metrics of what there is now."""
        self._metrics.sessions(record.state for record in self._records.sessions.values())
        for key, shared in list(self._records.pools.items()):
            try:
                status: PoolStatus = await asyncio.wait_for(shared.actor.status.remote(), ANSWER_S)
            except Exception as error:  # as above
                log.debug("raysessions: %s did not tell its status: %s", shared.name, error)
            else:
                self._metrics.pool(key.partition("\n")[0], status)


def _why_it_is_over(record: SessionRecord) -> str | None:
    now, limits = time.time(), record.limits
    if limits.max_lifetime_s is not None and now - record.created_at > limits.max_lifetime_s:
        return f"Its lifetime of {limits.max_lifetime_s:g} s is over (max_lifetime_s)."
    if limits.idle_timeout_s is not None and now - record.used_at > limits.idle_timeout_s:
        return f"It was not used for {limits.idle_timeout_s:g} s (idle_timeout_s)."
    if limits.lease_s is not None and now - max(record.renewed_at, record.used_at) > limits.lease_s:
        return f"Nobody renewed its lease for {limits.lease_s:g} s (lease_s)."
    return None
