"""Writes docs/tinker-compatibility.md: calls each public method of the tinker SDK against a gateway, and notes what came of it.

A method of a newer SDK that has no probe here stops it.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tinker
from tinker import types

import raysessions as rs
from raysessions.gateway import serving
from raysessions.gateway.config import GatewayConfig
from raysessions.gateway.keys import KeyStore
from raysessions.storage_location import StorageLocation

REPOSITORY = Path(__file__).parent.parent
PAGE = REPOSITORY / "docs" / "tinker-compatibility.md"
TEXT = Path(__file__).with_name("tinker_compatibility.md")
"""What no probe can find out; the table goes where it says so."""
NEVER_SENT = {
    "get_console_url": "builds an address of Tinker's own console",
    "get_telemetry": "telemetry is accepted and not kept",
    "on_queue_state_change": "called by the SDK itself",
    "create": "what `create_sampling_client` calls",
}
TOKENS = list(range(40, 60))


def probes(s: SimpleNamespace) -> dict[str, dict[str, Callable[[], Any]]]:
    """By class and method. Each makes the call and waits for its result."""

    def negated(logprobs: Any) -> Any:
        return -logprobs.sum(), {}

    def done(future: Any) -> Any:
        return future.result() if hasattr(future, "result") else future

    run, session = s.training.model_id, s.training.model_id.partition(":")[0]
    short, shorter, later = (done(s.training.save_state(name)).path for name in ("short", "shorter", "later"))

    def step() -> Any:
        s.training.forward_backward([s.datum], "cross_entropy")
        return done(s.training.optim_step(types.AdamParams()))

    return {
        "ServiceClient": {
            "create_lora_training_client": lambda: done(s.client.create_lora_training_client(s.base_model, rank=8)),
            "create_training_client_from_state": lambda: done(s.client.create_training_client_from_state(s.state)),
            "create_training_client_from_state_with_optimizer": lambda: done(
                s.client.create_training_client_from_state_with_optimizer(s.state)
            ),
            "create_sampling_client": lambda: done(s.client.create_sampling_client(model_path=s.weights)),
            "create_rest_client": lambda: s.client.create_rest_client(),
            "create_custom_loss": lambda: done(
                s.client.create_custom_loss(lambda logprobs: (-logprobs.sum(), {}), {"logprobs": 1})
            ),
            "copy_weights": lambda: copy(s),
            "get_server_capabilities": lambda: s.client.get_server_capabilities(),
            "close": lambda: done(tinker.ServiceClient(base_url=s.url, api_key=s.key).close("success")),
        },
        "TrainingClient": {
            "forward": lambda: done(s.training.forward([s.datum], "cross_entropy")),
            "forward_backward": lambda: done(s.training.forward_backward([s.datum], "cross_entropy")),
            "forward_backward_custom": lambda: done(
                s.training.forward_backward_custom([s.datum], lambda data, logprobs: (-logprobs[0].sum(), {}))
            ),
            "optim_step": step,
            "save_state": lambda: done(s.training.save_state("another")),
            "load_state": lambda: done(s.training.load_state(s.state)),
            "load_state_with_optimizer": lambda: done(s.training.load_state_with_optimizer(s.state)),
            "save_weights_for_sampler": lambda: done(s.training.save_weights_for_sampler("more")),
            "save_weights_and_get_sampling_client": lambda: done(s.training.save_weights_and_get_sampling_client()),
            "save_weights_external": lambda: done(s.training.save_weights_external("outside")),
            "create_sampling_client": lambda: done(s.training.create_sampling_client(s.weights)),
            "get_info": lambda: s.training.get_info(),
            "get_tokenizer": lambda: s.training.get_tokenizer(),
        },
        "SamplingClient": {
            "sample": lambda: done(s.sampler.sample(s.prompt, 2, s.params)),
            "compute_logprobs": lambda: done(s.sampler.compute_logprobs(s.prompt)),
            "get_base_model": lambda: s.sampler.get_base_model(),
            "get_sampler_handle": lambda: s.sampler.get_sampler_handle(),
            "from_sampler_handle": lambda: done(
                tinker.SamplingClient.from_sampler_handle(s.sampler.get_sampler_handle()).sample(s.prompt, 1, s.params)
            ),
            "get_tokenizer": lambda: s.sampler.get_tokenizer(),
        },
        "RestClient": {
            "get_server_capabilities": lambda: done(s.rest.get_server_capabilities()),
            "list_training_runs": lambda: done(s.rest.list_training_runs()),
            "get_training_run": lambda: done(s.rest.get_training_run(run)),
            "get_training_run_by_tinker_path": lambda: done(s.rest.get_training_run_by_tinker_path(s.state)),
            "get_weights_info_by_tinker_path": lambda: done(s.rest.get_weights_info_by_tinker_path(s.state)),
            "list_checkpoints": lambda: done(s.rest.list_checkpoints(run)),
            "list_user_checkpoints": lambda: done(s.rest.list_user_checkpoints()),
            "set_checkpoint_ttl_from_tinker_path": lambda: done(s.rest.set_checkpoint_ttl_from_tinker_path(later, 3600)),
            "delete_checkpoint_from_tinker_path": lambda: done(s.rest.delete_checkpoint_from_tinker_path(short)),
            "delete_checkpoint": lambda: done(s.rest.delete_checkpoint(run, shorter.partition(run + "/")[2])),
            "list_sessions": lambda: done(s.rest.list_sessions()),
            "get_session": lambda: done(s.rest.get_session(session)),
            "get_sampler": lambda: done(s.rest.get_sampler(done(s.rest.get_session(session)).sampler_ids[-1])),
            "copy_weights": lambda: done(s.rest.copy_weights(s.state, "project")),
            "publish_checkpoint_from_tinker_path": lambda: done(s.rest.publish_checkpoint_from_tinker_path(s.state)),
            "unpublish_checkpoint_from_tinker_path": lambda: done(s.rest.unpublish_checkpoint_from_tinker_path(s.state)),
            "get_external_weights_urls": lambda: done(
                s.rest.get_external_weights_urls(s.state.replace("/weights/", "/external_weights/"))
            ),
            "assign_session_project": lambda: done(s.rest.assign_session_project(session, "project")),
            "export_session_trace": lambda: done(s.rest.export_session_trace(session)),
            "search_sessions": lambda: done(s.rest.search_sessions(types.SessionSearchRequest())),
            "get_audit_log": lambda: done(s.rest.get_audit_log()),
            "get_billing_usage": lambda: done(s.rest.get_billing_usage("2026-01-01", "2026-01-02")),
            "get_current_checkpoint_storage_usage": lambda: done(s.rest.get_current_checkpoint_storage_usage()),
            "whoami": lambda: done(s.rest.whoami()),
        },
    }


def copy(s: SimpleNamespace) -> Any:
    """The SDK asks for a project first."""
    os.environ["TINKER_PROJECT_ID"] = "project"
    try:
        return s.client.copy_weights(s.state).result()
    finally:
        del os.environ["TINKER_PROJECT_ID"]


def main() -> None:
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(REPOSITORY / "tests"))
    with served() as s:
        table = list(rows(probes(s)))
    text = TEXT.read_text(encoding="utf-8")
    lines = ["| method | against the gateway |", "|---|---|", *(f"| `{method}` | {what} |" for method, what in table)]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(text.replace("<!-- table -->", "\n".join(lines)).replace("VERSION", tinker.__version__), encoding="utf-8")
    print(f"{PAGE}: {sum(what == 'works' for _, what in table)} of {len(table)} methods work")


def rows(probed: dict[str, dict[str, Callable[[], Any]]]) -> Iterator[tuple[str, str]]:
    """Each method, and what came of it."""
    for kind, calls in probed.items():
        for name in public_methods(getattr(tinker, kind)):
            if name in NEVER_SENT:
                yield f"{kind}.{name}", f"not sent: {NEVER_SENT[name]}"
                continue
            print(f"{kind}.{name}", flush=True)
            try:
                calls[name]()
                yield f"{kind}.{name}", "works"
            except Exception as error:
                yield f"{kind}.{name}", f"refused: {sentence(error)}"


def public_methods(kind: type) -> list[str]:
    """Without the `_async` twins, which send the same."""
    names = [name for name, member in inspect.getmembers(kind) if callable(member) and not name.startswith("_")]
    return [name for name in names if not name.endswith("_async")]


def sentence(error: Exception) -> str:
    """The gateway's own words."""
    found = re.search(r"'message': (['\"])(.*?)\1, 'type'", str(error))
    text = found[2] if found else str(error).partition(" for self.request_id")[0].removeprefix("Request failed: ")
    return text.removeprefix("Not supported by raysessions. ").replace("|", "\\|").splitlines()[0]


@contextmanager
def served() -> Iterator[SimpleNamespace]:
    """A gateway on a local Ray with a tiny model, and one of each client."""
    from clusters import free_port
    from tiny_model import make_tiny_model

    with tempfile.TemporaryDirectory() as folder, rs.ServiceClient(output_uri=folder):
        base_model, port = str(make_tiny_model(Path(folder) / "tiny")), free_port()
        no_cpu = {"num_cpus": 0}
        config = GatewayConfig(
            output_uri=folder,
            base_models=(base_model,),
            training=rs.TrainingConfig(actor_options=no_cpu),
            sampling=rs.SamplingConfig(kv_cache_gib=0.25, max_num_seqs=16, actor_options=no_cpu),
        )
        serving.start(config, "127.0.0.1", port)
        url, key = f"http://127.0.0.1:{port}", KeyStore(StorageLocation(folder)).create("docs")[0]
        os.environ.update(TINKER_TELEMETRY="0", TINKER_BASE_URL=url, TINKER_API_KEY=key)
        with tinker.ServiceClient() as client:
            training = client.create_lora_training_client(base_model, rank=8).result()
            weights = training.save_weights_for_sampler("weights").result().path
            yield SimpleNamespace(
                url=url,
                key=key,
                base_model=base_model,
                client=client,
                training=training,
                state=training.save_state("state").result().path,
                weights=weights,
                sampler=client.create_sampling_client(model_path=weights).result(),
                rest=client.create_rest_client(),
                datum=types.Datum(
                    model_input=types.ModelInput.from_ints(TOKENS[:-1]),
                    loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * (len(TOKENS) - 1)},
                ),
                prompt=types.ModelInput.from_ints(TOKENS[:5]),
                params=types.SamplingParams(max_tokens=4),
            )
        serving.stop()


if __name__ == "__main__":
    main()
