"""A run whose ranks and replicas are spread over two nodes, of which one is lost in the middle: the same losses and samples as
a run on one node that is left alone. Both nodes are of this machine.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings

import numpy as np
import ray
from measure import random_data, report
from ray.cluster_utils import Cluster

import raysessions as rs

SPREAD = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
PROMPT = rs.ModelInput.from_ints(range(40, 70))
GREEDY = rs.SamplingParams(max_tokens=10, temperature=0.0, stop=[])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="smollm2-135m-instruct")
    base_model = parser.parse_args().base_model
    training_config = rs.TrainingConfig(dtype="float32", num_workers=2, num_threads=1, actor_options=SPREAD)
    sampling_config = rs.SamplingConfig(dtype="float32", num_replicas=2, kv_cache_gib=0.5, num_threads=1, actor_options=SPREAD)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    second = cluster.add_node(num_cpus=4)
    ray.init(address=cluster.address, log_to_driver=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rs.ServiceClient().close()
    with (
        tempfile.TemporaryDirectory() as folder,
        rs.ServiceClient(training=training_config, sampling=sampling_config, output_uri=folder) as service,
    ):
        with service.create_lora_training_client(base_model, rank=8, seed=0) as training:
            losses = [step(training, number) for number in range(2)]
            sampler = training.save_weights_and_get_sampling_client("before")
            before = sampler.sample(PROMPT, 1, GREEDY).result().sequences[0].tokens
            spread = (len(nodes_of("TrainingActor")), len(nodes_of("SamplingActor")))
            is_apart = not nodes_of("ModelHost") & nodes_of("SessionVault")
            cluster.remove_node(second, allow_graceful=False)
            after = [sampler.sample(PROMPT, 1, GREEDY).result(timeout=300).sequences[0].tokens for _ in range(4)]
            losses += [step(training, number) for number in range(2, 4)]
        calm = rs.TrainingConfig(dtype="float32", num_workers=2, num_threads=1, actor_options={"num_cpus": 0})
        with service.create_lora_training_client(base_model, rank=8, seed=0, training=calm) as undisturbed:
            expected = [step(undisturbed, number) for number in range(4)]
    ray.shutdown()
    cluster.shutdown()
    report(
        "two_nodes",
        {"losses": losses, "losses_undisturbed": expected},
        {
            "warnings that the other node cannot read the default output_uri": (
                sum("output_uri" in str(warning.message) for warning in caught),
                1,
            ),
            "nodes with ranks": (spread[0], 2),
            "nodes with replicas": (spread[1], 2),
            "host and vault on different nodes": (float(is_apart), 1),
            "samples that are not as before": (sum(tokens != before for tokens in after), -0.0),
            "largest relative difference of a loss": (float(np.max(np.abs(np.array(losses) / np.array(expected) - 1))), -1e-4),
        },
    )


def step(training: rs.TrainingClient, number: int) -> float:
    vocab_size = training.get_info().vocab_size
    output = training.forward_backward(random_data([20, 7, 50, 30 + number], vocab_size))
    training.optim_step(rs.AdamParams(learning_rate=1e-3))
    return output.result(timeout=300).loss


def nodes_of(class_name: str) -> set[str]:
    actors = ray._private.state.actors().values()
    return {
        actor["Address"]["NodeID"] for actor in actors if actor["ActorClassName"] == class_name and actor["State"] == "ALIVE"
    }


if __name__ == "__main__":
    main()
