"""`raysessions …` on the command line."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from raysessions.errors import RaySessionsError
from raysessions.storage_location import StorageLocation


class _Told(click.Group):
    """Our errors are sentences already."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except RaySessionsError as error:
            raise click.ClickException(str(error)) from error


def _output_uri(command: Callable[..., Any]) -> Callable[..., Any]:
    text = "Where versions and keys are: a folder that the nodes share, or s3://, gs://, hdfs://. Default: the cluster's home."
    return click.option("--output-uri", envvar="RAYSESSIONS_OUTPUT_URI", help=text)(command)


@click.group(cls=_Told)
@click.version_option(package_name="raysessions")
def main() -> None:
    """Training sessions for language models on your own Ray cluster."""


@main.command()
@click.option("--address", default="auto", show_default=True, help="Of the Ray cluster.")
@click.option("--host", default="127.0.0.1", show_default=True, help="0.0.0.0 lets others in.")
@click.option("--port", default=8000, show_default=True)
@click.option("--base-model", "base_models", multiple=True, help="That keys may use; give it again for more.")
@click.option("--tool-call-parser", help="vLLM's parser of tool calls, for chat completions.")
@click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help='JSON with fields of GatewayConfig, such as {"training": {"num_workers": 2}, "sampling": {"num_replicas": 2}}.',
)
@click.option("--detach", is_flag=True, help="Return, and leave it running until `raysessions stop`.")
@_output_uri
def serve(
    address: str,
    host: str,
    port: int,
    base_models: tuple[str, ...],
    tool_call_parser: str | None,
    config: Path | None,
    detach: bool,
    output_uri: str | None,
) -> None:
    """Serve sessions over HTTP: OpenAI's API to sample from them, Tinker's to train too."""
    from raysessions.cluster import connect
    from raysessions.gateway import serving
    from raysessions.gateway.config import GatewayConfig

    fields = _read(config)
    if tool_call_parser is not None:
        fields["sampling"] = {**fields.get("sampling", {}), "tool_call_parser": tool_call_parser}
    fields |= {"output_uri": output_uri} if output_uri is not None else {}
    fields["base_models"] = [*fields.get("base_models", []), *base_models]
    settings = GatewayConfig(**fields)
    connect(address)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        url = serving.start(settings, host, port)
        click.echo(f"Serving on {url}. Keys: raysessions keys create --tenant NAME")
        if detach:
            return
        threading.Event().wait()
    except KeyboardInterrupt:
        click.echo("Stopping: requests under way are answered first.")
    serving.stop()


@main.command()
@click.option("--address", default="auto", show_default=True, help="Of the Ray cluster.")
def stop(address: str) -> None:
    """Stop serving. Requests under way are answered first."""
    from raysessions.cluster import connect
    from raysessions.gateway import serving

    connect(address)
    serving.stop()


@main.group()
def keys() -> None:
    """API keys of the gateway. Only their hashes are kept."""


@keys.command("create")
@click.option("--tenant", required=True, help="Whose sessions, versions and ledger the key reaches.")
@click.option("--note", default="", help="To remember it by.")
@_output_uri
def create_key(tenant: str, note: str, output_uri: str | None) -> None:
    """Make a key and print it. It cannot be shown again."""
    secret, key = _store(output_uri).create(tenant, note)
    click.echo(secret)
    click.echo(f"Key {key.key_id} of tenant {key.tenant}.", err=True)


@keys.command("list")
@_output_uri
def list_keys(output_uri: str | None) -> None:
    """List the keys, oldest first."""
    for key in _store(output_uri).list():
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created_at))
        click.echo(f"{key.key_id}  {key.tenant}  {made}  {key.note}")


@keys.command("revoke")
@click.argument("key_id")
@_output_uri
def revoke_key(key_id: str, output_uri: str | None) -> None:
    """End a key, within ten seconds."""
    _store(output_uri).revoke(key_id)


def _read(config: Path | None) -> dict[str, Any]:
    if config is None:
        return {}
    try:
        fields = json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise click.ClickException(f"{config} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise click.ClickException(f"{config} is not a JSON object.")
    return fields


def _store(output_uri: str | None) -> Any:
    from raysessions.gateway.keys import KeyStore

    return KeyStore(StorageLocation(output_uri))
