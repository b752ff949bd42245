"""Who may import whom, read from the source: the path of a file names its room."""

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parent.parent
LIBRARY = REPOSITORY / "raysessions"
ACTORS = REPOSITORY / "actors"

WORDS = [
    LIBRARY / f"{name}.py"
    for name in (
        *("types", "errors", "losses", "config", "uris", "operations", "batch", "datums", "models"),
        *("adapter_weights", "encryption", "manifest", "registry", "responses", "saved_adapter", "storage", "storage_location"),
        *("ledger", "network", "quota", "session_summary", "settings", "training_state", "usage", "version_numbers"),
    )
]
# A new file beside the words is a client until it is listed elsewhere.
CLIENTS = sorted(set(LIBRARY.glob("*.py")) - set(WORDS))
CUSTOM_LOSS = LIBRARY / "custom_loss.py"
GATEWAY = sorted((LIBRARY / "gateway").rglob("*.py"))
COOKBOOK = sorted((LIBRARY / "cookbook").rglob("*.py"))
HOSTING = sorted(ACTORS.glob("*.py"))
ENGINES = sorted((ACTORS / "engines").rglob("*.py"))
MATHS = sorted((ACTORS / "maths").rglob("*.py"))
SOURCES = WORDS + CLIENTS + GATEWAY + COOKBOOK + HOSTING + ENGINES + MATHS
VLLM_FILES = [
    *sorted((ACTORS / "engines").glob("vllm*.py")),
    *(ACTORS / "engines" / f"{name}.py" for name in ("grouped_lora", "cpu_kernels", "cpu_sampler")),
]

FRAMEWORKS = ("torch", "vllm", "deepspeed", "peft")


class Import(NamedTuple):
    """An import statement, one for each name."""

    module: str
    line: int
    at_load: bool
    """False inside a function or under `if TYPE_CHECKING:`: importing the file does not run it."""


def imports(source: str, package: str) -> Iterator[Import]:
    """Every import in `source`, a file of `package`."""

    def visit(node: ast.AST, at_load: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, at_load) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (Import(f"{module}.{alias.name}", node.lineno, at_load) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            for child in node.body:
                yield from visit(child, False)
            for child in node.orelse:
                yield from visit(child, at_load)
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                yield from visit(child, at_load and not is_function)

    return visit(ast.parse(source), True)


def is_in(module: str, names: tuple[str, ...]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def breaches(
    source: str, package: str, forbidden: tuple[str, ...], allowed: tuple[str, ...] = (), at_load_only: bool = False
) -> list[str]:
    """The imports in `source` of anything in `forbidden`, but for what is in `allowed`."""
    return [
        f"line {found.line}: {found.module}"
        for found in imports(source, package)
        if is_in(found.module, forbidden) and not is_in(found.module, allowed) and (found.at_load or not at_load_only)
    ]


def package_of(file: Path) -> str:
    inside = file.relative_to(REPOSITORY).parent.parts
    return ".".join(inside if inside[0] == "raysessions" else ("raysessions", *inside))


def breaches_in(files: list[Path], *forbidden: str, allowed: tuple[str, ...] = (), at_load_only: bool = False) -> list[str]:
    assert files
    return [
        f"{file.relative_to(REPOSITORY)}, {breach}"
        for file in files
        for breach in breaches(file.read_text(encoding="utf-8"), package_of(file), forbidden, allowed, at_load_only)
    ]


def test_words_load_without_ray_and_torch():
    assert breaches_in(WORDS, "ray", *FRAMEWORKS, at_load_only=True) == []


def test_words_load_only_words():
    words = tuple(f"raysessions.{file.stem}" for file in WORDS)
    assert breaches_in(WORDS, "raysessions", allowed=words, at_load_only=True) == []


def test_clients_never_import_engines_or_their_frameworks():
    others = [file for file in CLIENTS if file != CUSTOM_LOSS]
    assert breaches_in(others, *FRAMEWORKS, "raysessions.actors.engines") == []


def test_the_users_own_loss_needs_torch_when_it_is_called_only():
    assert breaches_in([CUSTOM_LOSS], *FRAMEWORKS, at_load_only=True) == []
    assert breaches_in([CUSTOM_LOSS], "vllm", "deepspeed", "peft", "raysessions.actors") == []


def test_engines_never_import_ray():
    assert breaches_in(ENGINES, "ray") == []


def test_actors_load_without_the_frameworks():
    assert breaches_in(HOSTING, *FRAMEWORKS, at_load_only=True) == []


def test_actors_load_no_engine():
    assert breaches_in(HOSTING, "raysessions.actors.engines", at_load_only=True) == []


def test_maths_never_imports_ray():
    assert breaches_in(MATHS, "ray") == []


def test_maths_knows_no_engine_and_no_actor():
    assert breaches_in(MATHS, "raysessions.actors", allowed=("raysessions.actors.maths",)) == []


def test_the_gateway_never_imports_engines_or_their_frameworks():
    assert breaches_in(GATEWAY, *FRAMEWORKS, "raysessions.actors.engines") == []


def test_the_cookbook_uses_the_clients_only():
    assert breaches_in(COOKBOOK, "raysessions.actors") == []


def test_vllm_is_imported_in_its_own_files_only():
    assert breaches_in([file for file in SOURCES if file not in VLLM_FILES], "vllm") == []
    assert breaches_in(VLLM_FILES[:1], "vllm") != []


def test_no_file_is_above_300_lines():
    lengths = {str(file.relative_to(REPOSITORY)): len(file.read_text(encoding="utf-8").splitlines()) for file in SOURCES}
    assert {name: length for name, length in lengths.items() if length > 300} == {}


def test_no_file_is_a_drawer_for_everything():
    assert [file for file in SOURCES if file.stem in {"utils", "util", "common", "helpers", "misc"}] == []


def test_every_source_file_is_in_a_room():
    found = {file for top in (LIBRARY, ACTORS) for file in top.rglob("*.py") if LIBRARY / "actors" not in file.parents}
    assert found == set(SOURCES)


def test_the_folder_actors_refuses_to_be_imported_by_that_name():
    script = "try:\n    import actors\nexcept ImportError as error:\n    print(error)"
    told = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, check=True, capture_output=True, text=True, timeout=60
    )
    assert "Write `import raysessions.actors`." in told.stdout
    assert "was imported as 'actors'" in told.stdout


BROKEN = """
from __future__ import annotations
from typing import TYPE_CHECKING
import typing
import os, torch.nn as nn
from raysessions import actors
if TYPE_CHECKING:
    import ray
else:
    import vllm
if typing.TYPE_CHECKING:
    import ray
if not TYPE_CHECKING:
    import deepspeed
class Client:
    from .actors.engines import deepspeed
    async def sample(self):
        import peft
        return lambda: __name__
try:
    from ray.exceptions import RayError
except ImportError:
    import raylike
"""


@pytest.mark.parametrize(
    ("forbidden", "at_load", "anywhere"),
    [
        ("torch", ["line 5: torch.nn"], ["line 5: torch.nn"]),
        ("vllm", ["line 10: vllm"], ["line 10: vllm"]),
        ("peft", [], ["line 18: peft"]),
        ("ray", ["line 21: ray.exceptions.RayError"], ["line 8: ray", "line 12: ray", "line 21: ray.exceptions.RayError"]),
        ("raysessions.actors.engines", *[["line 16: raysessions.actors.engines.deepspeed"]] * 2),
        ("raysessions.actors", *[["line 6: raysessions.actors", "line 16: raysessions.actors.engines.deepspeed"]] * 2),
        ("deepspeed", ["line 14: deepspeed"], ["line 14: deepspeed"]),
        ("transformers", [], []),
    ],
)
def test_the_checker_sees_a_broken_rule(forbidden: str, at_load: list[str], anywhere: list[str]):
    assert breaches(BROKEN, "raysessions", (forbidden,), at_load_only=True) == at_load
    assert breaches(BROKEN, "raysessions", (forbidden,)) == anywhere


def test_the_checker_lets_what_is_allowed_through():
    source = "from raysessions.actors.engines import attention\nfrom raysessions.actors.engines.vllm import VllmEngine\n"
    forbidden, allowed = ("raysessions.actors.engines",), ("raysessions.actors.engines.attention",)
    assert breaches(source, "raysessions.actors", forbidden, allowed) == ["line 2: raysessions.actors.engines.vllm.VllmEngine"]
