"""The base model's tokenizer, brought from the cluster: the caller's machine needs neither the files nor a hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any


def load_tokenizer(files: dict[str, bytes]) -> Any:
    """A transformers tokenizer from its files by name."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="raysessions-tokenizer-") as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return AutoTokenizer.from_pretrained(folder)
