"""Direct preference optimization (Rafailov et al. 2023): a loss that couples two answers, by `forward_backward_custom`.

python examples/dpo.py                                  # generated pairs: a bare number is preferred to a sentence
python examples/dpo.py --data pairs.jsonl               # one {"prompt", "chosen", "rejected"} a line
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import raysessions as rs
from raysessions.cookbook.table import StepTable

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the better one first."""

    prompt: str
    chosen: str
    rejected: str


def main() -> None:
    args = parse_args()
    pairs = load(args.data) if args.data else generate()
    random.Random(args.seed).shuffle(pairs)
    held_out, train = pairs[: args.held_out], pairs[args.held_out :]
    service = rs.ServiceClient(args.address)
    with service.create_lora_training_client(args.base_model, rank=16, seed=args.seed) as training:
        tokenizer = training.get_tokenizer()
        reference = {"forward": forward_logprobs, "sampler": sampler_logprobs}[args.reference]
        train_data = with_reference(reference(training, data := datums(tokenizer, train)), data)
        held_out_data = with_reference(reference(training, data := datums(tokenizer, held_out)), data)
        loss = DPOLoss(args.beta)
        rng = random.Random(args.seed)
        with StepTable("step", "loss a pair", "preferred", "margin", "held-out", "grad norm") as table:
            for step in range(1, args.steps + 1):
                batch = draw(rng, train_data, args.batch_size)
                forward_backward = training.forward_backward_custom(batch, loss)
                optim_step = training.optim_step(rs.AdamParams(learning_rate=args.learning_rate))  # queued behind it
                accuracy = preferred(training, held_out_data, loss)
                metrics = forward_backward.result().metrics
                table.add(
                    step, metrics["loss:sum"] / args.batch_size, f"{metrics['preferred:mean']:.0%}", metrics["margin:mean"],
                    f"{accuracy:.0%}", optim_step.result().metrics["grad_norm:max"],
                )  # fmt: skip
        sampler = training.save_weights_and_get_sampling_client("end")
        prompt = rs.ModelInput.from_ints(render(tokenizer, held_out[0].prompt))
        sequence = (
            sampler.sample(prompt, sampling_params=rs.SamplingParams(max_tokens=40, temperature=0.0)).result().sequences[0]
        )
    print(f"\nHeld-out pairs whose better answer gained more: {accuracy:.0%} of {len(held_out)}")
    print(f"Asked:  {held_out[0].prompt}\nAnswer: {tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()}")


class DPOLoss:
    """−log σ(beta · margin) for each pair; the margin is how much more the chosen answer gained over the reference than the
    rejected one, in nats."""

    def __init__(self, beta: float) -> None:
        self.beta = beta

    def __call__(self, data: Sequence[rs.Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        import torch

        gains = []
        for datum, logprobs_T in zip(data, logprobs, strict=True):
            weights_T, reference_T = (torch.tensor(datum.loss_fn_inputs[key]) for key in ("weights", "reference"))
            gains.append(((logprobs_T - reference_T) * weights_T).sum())
        chosen_P, rejected_P = torch.stack(gains[::2]), torch.stack(gains[1::2])
        margin_P = self.beta * (chosen_P - rejected_P)
        loss = -torch.nn.functional.logsigmoid(margin_P).sum()
        return loss, {"preferred:mean": (margin_P > 0).float().mean().item(), "margin:mean": margin_P.mean().item()}


def preferred(training: rs.TrainingClient, data: list[rs.Datum], loss: DPOLoss) -> float:
    """The share of pairs whose margin is above 0."""
    outputs = training.forward([dataclasses.replace(datum, loss_fn_inputs=for_forward(datum)) for datum in data]).result()
    _, metrics = loss(data, [output["logprobs"].to_torch() for output in outputs.loss_fn_outputs])
    return metrics["preferred:mean"]


def for_forward(datum: rs.Datum) -> dict[str, Any]:
    return {key: datum.loss_fn_inputs[key] for key in ("target_tokens", "weights")}


def forward_logprobs(training: rs.TrainingClient, data: list[rs.Datum]) -> list[np.ndarray]:
    """The reference is the model before its first step: a new adapter changes nothing."""
    outputs = training.forward(data).result().loss_fn_outputs
    return [output["logprobs"].to_numpy() for output in outputs]


def sampler_logprobs(training: rs.TrainingClient, data: list[rs.Datum]) -> list[np.ndarray]:
    """The reference is a frozen sampler: here of the base model, elsewhere of any saved version."""
    sampler = training.create_sampling_client()
    sequences = [[*datum.model_input.to_ints(), int(datum.loss_fn_inputs["target_tokens"][-1])] for datum in data]
    futures = [sampler.compute_logprobs(rs.ModelInput.from_ints(sequence)) for sequence in sequences]
    return [np.asarray(future.result()[1:], dtype=np.float32) for future in futures]


def with_reference(reference: list[np.ndarray], data: list[rs.Datum]) -> list[rs.Datum]:
    return [
        dataclasses.replace(datum, loss_fn_inputs={**datum.loss_fn_inputs, "reference": logprobs})
        for datum, logprobs in zip(data, reference, strict=True)
    ]


def draw(rng: random.Random, data: list[rs.Datum], num_pairs: int) -> list[rs.Datum]:
    """Whole pairs: chosen and rejected stay next to each other."""
    indices = rng.sample(range(len(data) // 2), min(num_pairs, len(data) // 2))
    return [data[2 * index + side] for index in indices for side in (0, 1)]


def datums(tokenizer: Any, pairs: list[Preference]) -> list[rs.Datum]:
    """Chosen and rejected by turns, with weight on the answers' tokens only."""
    data = []
    for pair in pairs:
        prompt = render(tokenizer, pair.prompt)
        for answer in (pair.chosen, pair.rejected):
            tokens = prompt + tokenizer.encode(answer, add_special_tokens=False) + [tokenizer.eos_token_id]
            data.append(rs.datum_for_supervised(tokens, [0.0] * len(prompt) + [1.0] * (len(tokens) - len(prompt))))
    return data


def render(tokenizer: Any, prompt: str) -> list[int]:
    messages = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def generate() -> list[Preference]:
    """Additions, answered by the bare number or by a sentence."""
    return [
        Preference(f"What is {a} + {b}?", str(a + b), f"The sum of {a} and {b} is equal to {a + b}.")
        for a, b in itertools.product(range(10), repeat=2)
    ]


def load(path: str) -> list[Preference]:
    """Reads a JSON-lines file of preferences."""
    with open(path, encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    return [Preference(row["prompt"], row["chosen"], row["rejected"]) for row in rows]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="smollm2-135m-instruct", help="a folder, a Hugging Face id or a catalogue name")
    parser.add_argument("--address", default=None, help="of a Ray cluster; by default RAY_ADDRESS, else a local Ray")
    parser.add_argument("--data", default=None, help="a JSON-lines file; by default generated pairs")
    parser.add_argument("--held-out", type=int, default=8, help="pairs kept for measuring")
    parser.add_argument(
        "--reference", choices=["forward", "sampler"], default="forward", help="where reference logprobs come from"
    )
    parser.add_argument("--beta", type=float, default=0.1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8, help="pairs a step")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
