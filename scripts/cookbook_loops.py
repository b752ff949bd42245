"""Runs tinker-cookbook's own sl_loop and rl_loop, unmodified, for a few steps against a gateway, without a hub.

    pip install tinker-cookbook     # into an environment of its own
    python scripts/cookbook_loops.py --python COOKBOOK_ENVIRONMENT/bin/python

The loops look their model and data up by the hub's names. Here these names stand for SmolLM2-135M-Instruct and for one-digit
additions in GSM8K's format, in a cache and a working folder of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
from pathlib import Path

MODEL = "Qwen/Qwen3-8B-Base"
"""A name for which the cookbook has a renderer that needs no special tokens."""
LOOPS = {
    "sl_loop": ("train_mean_nll", ["batch_size=16", "max_length=256", "learning_rate=2e-3", "lora_rank=16"]),
    "rl_loop": (
        "reward/total",
        ["batch_size=8", "group_size=8", "max_tokens=24", "learning_rate=1e-3", "lora_rank=16", "loss_fn=importance_sampling"],
    ),
}
"""What to look at, and the loop's own arguments."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="of the environment that has tinker-cookbook")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        os.environ |= {"HF_HOME": str(here / "hf"), "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
        lay_out(here)
        serve_and_run(here, arguments.python, arguments.steps)


def lay_out(here: Path) -> None:
    """The model in a hub's cache, the data as folders of the names that the loops load."""
    from raysessions.models import local_folder

    snapshot = here / "hf" / "hub" / f"models--{MODEL.replace('/', '--')}" / "snapshots" / "local"
    snapshot.mkdir(parents=True)
    for file in local_folder("smollm2-135m-instruct").iterdir():
        (snapshot / file.name).symlink_to(file.resolve())
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("local")
    rng = random.Random(0)
    sums = [(rng.randrange(1, 10), rng.randrange(1, 10)) for _ in range(640)]
    questions = [{"question": f"What is {a} plus {b}?", "answer": f"{a} + {b} = {a + b}\n#### {a + b}"} for a, b in sums]
    chats = [
        {"messages": [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]}
        for row in questions
    ]
    write_dataset(here / "openai" / "gsm8k", "main", questions)
    write_dataset(here / "HuggingFaceH4" / "no_robots", "default", chats)


def write_dataset(folder: Path, config: str, rows: list[dict[str, object]]) -> None:
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {config}\n  data_files: train.jsonl\n---\n")


def serve_and_run(here: Path, python: str, steps: int) -> None:
    import raysessions as rs
    from raysessions.gateway import serving
    from raysessions.gateway.config import GatewayConfig
    from raysessions.gateway.keys import KeyStore
    from raysessions.storage_location import StorageLocation

    uri, port = str(here / "versions"), 8123
    with rs.ServiceClient(output_uri=uri):
        serving.start(GatewayConfig(output_uri=uri, base_models=(MODEL,)), "127.0.0.1", port)
        environment = {**os.environ, "TINKER_API_KEY": KeyStore(StorageLocation(uri)).create("cook")[0]}
        for loop, (metric, own) in LOOPS.items():
            log = here / loop
            command = [python, "-m", f"tinker_cookbook.recipes.{loop}", f"base_url=http://127.0.0.1:{port}"]
            command += [f"model_name={MODEL}", f"log_path={log}", f"max_steps={steps}", *own]
            print(" ".join(command[1:]), flush=True)
            subprocess.run(command, cwd=here, env=environment, check=True)
            rows = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
            print(f"{loop}: {metric}:", [round(row[metric], 3) for row in rows if metric in row], flush=True)
            print((log / "checkpoints.jsonl").read_text(), flush=True)
        serving.stop()


if __name__ == "__main__":
    main()
