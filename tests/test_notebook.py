"""The notebook runs, in a kernel connected to a cluster, and shows what a person can read."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import ray
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parent.parent / "examples" / "session.ipynb"


def outputs(cell: nbformat.NotebookNode) -> str:
    """What a cell shows, as text."""
    return "".join(
        output.get("text", "") + "".join(output.get("data", {}).get("text/plain", "")) for output in cell.get("outputs", [])
    )


def test_the_notebook_runs_from_top_to_bottom(resident, tiny_model, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
    monkeypatch.setenv("IPYTHONDIR", os.environ["RAYSESSIONS_HOME"])
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("smollm2-135m-instruct", str(tiny_model))
    NotebookClient(notebook, timeout=180, kernel_name="python3").execute()
    shown = [outputs(cell) for cell in notebook.cells if cell.cell_type == "code"]
    assert "ServiceClient(" in shown[0]
    assert "TrainingClient(session-" in shown[1]
    assert "ForwardBackwardOutput(1 datums, loss:sum=" in shown[3]
    assert shown[4].strip("'\n") != shown[2].strip("'\n")
    assert "CheckpointInfo(path='raysessions://default/v" in shown[5]
    assert "running" in shown[6]
    assert "Usage(forward_tokens=0, trained_tokens=" in shown[6]
