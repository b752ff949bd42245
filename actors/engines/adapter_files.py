"""What an engine has in /dev/shm, which is memory: adapters as PEFT folders, because vLLM takes adapters by path and reloads an
evicted one from it; and the names of vLLM's own buffers, which it leaves behind when it is killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from raysessions.adapter_weights import AdapterWeights, to_peft_files

_PREFIX = "raysessions-"
_BUFFERS = "vllm_buffers"
"""File with the paths of vLLM's buffers, one a line."""


class AdapterFiles:
    """The files of one engine. Those of engines whose process is gone are swept away at start."""

    def __init__(self) -> None:
        root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        _sweep(root)
        self.root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))

    def write(self, adapter_id: int, weights: AdapterWeights) -> Path:
        folder = self.folder(adapter_id)
        folder.mkdir()
        for name, content in to_peft_files(weights).items():
            (folder / name).write_bytes(content)
        return folder

    def folder(self, adapter_id: int) -> Path:
        return self.root / str(adapter_id)

    def remove(self, adapter_id: int) -> None:
        shutil.rmtree(self.folder(adapter_id), ignore_errors=True)

    def note_buffers(self, pids: Iterable[int]) -> None:
        """Remembers the shared memory that vLLM's processes have mapped."""
        mapped = {line.split()[-1] for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
        (self.root / _BUFFERS).write_text("\n".join(sorted(path for path in mapped if path.startswith("/dev/shm/psm_"))))

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def _sweep(root: Path) -> None:
    for folder in root.glob(f"{_PREFIX}*-*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(FileNotFoundError):
                for path in (folder / _BUFFERS).read_text().splitlines():
                    Path(path).unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
