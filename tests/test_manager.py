"""A cluster's manager comes with the first driver and goes with the last."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import raysessions as rs

config = rs.TrainingConfig(num_threads=1, actor_options={"num_cpus": 0})
kept = []
for round in range(3):
    with rs.ServiceClient(training=config) as service:
        kept.append(service.create_lora_training_client(sys.argv[1], rank=2))
        kept.append(kept[-1].forward([rs.datum_for_supervised([5, 6, 7], [1.0] * 3)]))
        kept[-1].result()
    print("round", round, flush=True)
try:
    kept[0].forward([rs.datum_for_supervised([5, 6, 7], [1.0] * 3)]).result()
except rs.SessionStoppedError as error:
    print("stopped", flush=True)
"""


def test_a_new_service_starts_while_clients_and_futures_of_a_closed_one_are_still_held(tiny_model):
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(tiny_model)], capture_output=True, text=True, timeout=150)
    assert done.stdout.splitlines() == ["round 0", "round 1", "round 2", "stopped"], done.stderr[-2000:]
