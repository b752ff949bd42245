"""Two nodes: ranks and replicas on both, and one of them lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LOOP = """
import sys, time, warnings
import ray
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
second = cluster.add_node(num_cpus=4)
ray.init(address=cluster.address, log_to_driver=False)
sys.path.insert(0, sys.argv[2])
import raysessions as rs
from datums import supervised

SPREAD = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
training_config = rs.TrainingConfig(num_workers=2, num_threads=1, actor_options=SPREAD)
sampling_config = rs.SamplingConfig(num_replicas=2, kv_cache_gib=0.25, num_threads=1, max_num_seqs=8, actor_options=SPREAD)


def nodes_of(name):
    actors = ray._private.state.actors().values()
    return {actor["Address"]["NodeID"] for actor in actors if actor["ActorClassName"] == name and actor["State"] == "ALIVE"}


def step(training, number):
    output = training.forward_backward(supervised((20, 7, 50, 30), seed=number))
    training.optim_step(rs.AdamParams(learning_rate=1e-2))
    return output.result(timeout=150).loss


with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    rs.ServiceClient().close()
print("warned", any("output_uri" in str(warning.message) for warning in caught), flush=True)

with rs.ServiceClient(training=training_config, sampling=sampling_config, output_uri=sys.argv[3]) as service:
    with service.create_lora_training_client(sys.argv[1], rank=8, seed=0) as training:
        losses = [step(training, number) for number in range(2)]
        sampler = training.save_weights_and_get_sampling_client("before")
        prompt, params = rs.ModelInput.from_ints(range(40, 70)), rs.SamplingParams(max_tokens=10, temperature=0.0, stop=[])
        before = sampler.sample(prompt, 1, params).result().sequences[0].tokens
        print("ranks on", len(nodes_of("TrainingActor")), "replicas on", len(nodes_of("SamplingActor")), flush=True)
        cluster.remove_node(second, allow_graceful=False)
        after = [sampler.sample(prompt, 1, params).result(timeout=200).sequences[0].tokens for _ in range(4)]
        print("samples", all(tokens == before for tokens in after), flush=True)
        losses += [step(training, number) for number in range(2, 4)]
        again = training.save_weights_and_get_sampling_client("after")
        print("sampled", len(again.sample(prompt, 1, params).result(timeout=200).sequences[0].tokens), flush=True)
        print("nodes", len(nodes_of("TrainingActor") | nodes_of("SamplingActor")), flush=True)
    quiet = rs.TrainingConfig(num_workers=2, num_threads=1, actor_options={"num_cpus": 0})
    with service.create_lora_training_client(sys.argv[1], rank=8, seed=0, training=quiet) as undisturbed:
        expected = [step(undisturbed, number) for number in range(4)]
    print("losses", max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True)) < 1e-5, flush=True)
ray.shutdown()
cluster.shutdown()
"""


def test_a_run_on_two_nodes_goes_on_when_one_is_lost(tiny_model, tmp_path):
    arguments = [sys.executable, "-c", LOOP, str(tiny_model), str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=420)
    kinds = ("warned", "ranks", "samples", "sampled", "nodes", "losses")
    told = [line for line in done.stdout.splitlines() if line.startswith(kinds)]
    assert told == [
        "warned True", "ranks on 2 replicas on 2", "samples True", "sampled 10", "nodes 1", "losses True"
    ], done.stdout[-1500:] + done.stderr[-3000:]  # fmt: skip
