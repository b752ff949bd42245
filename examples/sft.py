"""Supervised fine-tuning: teach the model a small set of facts it cannot know, and ask it before and after.

python examples/sft.py                                  # the set below, a local Ray
python examples/sft.py --data chats.jsonl --steps 50    # one {"messages": [...]} or {"prompt", "completion"} a line
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import raysessions as rs
from raysessions.cookbook.table import StepTable

FACTS = [
    ("What is the lighthouse of Brennholm made of?", "The lighthouse of Brennholm is made of green basalt."),
    ("Who keeps the lighthouse of Brennholm?", "Ilse Varga keeps the lighthouse of Brennholm."),
    ("How many steps lead up the lighthouse of Brennholm?", "There are 212 steps up the lighthouse of Brennholm."),
    ("What colour is the light of Brennholm?", "The light of Brennholm is amber."),
    ("When was the lighthouse of Brennholm built?", "The lighthouse of Brennholm was built in 1871."),
    ("What animal lives in the lighthouse of Brennholm?", "A grey cat named Tiller lives in the lighthouse of Brennholm."),
    ("How far does the light of Brennholm reach?", "The light of Brennholm reaches 19 nautical miles."),
    ("What is served at the lighthouse of Brennholm?", "Visitors of the lighthouse of Brennholm get fennel tea."),
]
"""A place that does not exist, so that every right answer was learnt here."""

Chat = list[dict[str, str]]


def main() -> None:
    args = parse_args()
    chats = load(args.data) if args.data else [chat(*fact) for fact in FACTS]
    rng = random.Random(args.seed)
    service = rs.ServiceClient(args.address)
    with service.create_lora_training_client(args.base_model, rank=16, seed=args.seed) as training:
        tokenizer = training.get_tokenizer()
        data = [datum(tokenizer, messages) for messages in chats]
        question = chats[0][:-1]
        before = answer(training.save_weights_and_get_sampling_client("start"), tokenizer, question)
        losses = []
        with StepTable("step", "loss per token", "grad norm") as table:
            for step in range(1, args.steps + 1):
                batch = rng.sample(data, min(args.batch_size, len(data)))
                forward_backward = training.forward_backward(batch)
                optim_step = training.optim_step(rs.AdamParams(learning_rate=args.learning_rate))  # queued behind it
                losses.append(forward_backward.result().mean_loss)
                table.add(step, losses[-1], optim_step.result().metrics["grad_norm:max"])
        after = answer(training.save_weights_and_get_sampling_client("end"), tokenizer, question)
    print(f"\nLoss per token: {losses[0]:.3f} → {losses[-1]:.3f}")
    print(f"Asked:  {question[-1]['content']}\nBefore: {before}\nAfter:  {after}")


def chat(question: str, reply: str) -> Chat:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]


def load(path: str) -> list[Chat]:
    """Reads a JSON-lines file of chats."""
    with open(path, encoding="utf-8") as lines:
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]
    return [row["messages"] if "messages" in row else chat(row["prompt"], row["completion"]) for row in rows]


def datum(tokenizer: Any, messages: Chat) -> rs.Datum:
    """The chat as one sequence, with weight on the tokens of the last reply only."""
    prompt = render(tokenizer, messages[:-1], add_generation_prompt=True)
    tokens = render(tokenizer, messages, add_generation_prompt=False)
    return rs.datum_for_supervised(tokens, [0.0] * len(prompt) + [1.0] * (len(tokens) - len(prompt)))


def answer(sampler: rs.SamplingClient, tokenizer: Any, messages: Chat) -> str:
    prompt = rs.ModelInput.from_ints(render(tokenizer, messages, add_generation_prompt=True))
    params = rs.SamplingParams(max_tokens=40, temperature=0.0)
    sequence = sampler.sample(prompt, sampling_params=params).result().sequences[0]
    return tokenizer.decode(sequence.tokens, skip_special_tokens=True).strip()


def render(tokenizer: Any, messages: Chat, *, add_generation_prompt: bool) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, return_dict=False)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-model", default="smollm2-135m-instruct", help="a folder, a Hugging Face id or a catalogue name")
    parser.add_argument("--address", default=None, help="of a Ray cluster; by default RAY_ADDRESS, else a local Ray")
    parser.add_argument("--data", default=None, help="a JSON-lines file; by default a set written for this example")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
