"""Wherever the package is installed or copied to, the folder actors/ is in it as raysessions.actors."""

import importlib.metadata
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import raysessions.actors

REPOSITORY = Path(__file__).parent.parent
PLUGIN = "raysessions.actors.engines.vllm_plugin:register"
# What a checkout has besides its sources; an old build folder would leak into the wheel.
NOT_SOURCES = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "benchmarks", "shared")


def tell(script: str, **kwargs: object) -> str:
    """What `script` prints in a Python of its own."""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=60, **kwargs)
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    checkout = shutil.copytree(REPOSITORY, folder / "checkout", symlinks=True, ignore=NOT_SOURCES)
    assert (checkout / "raysessions" / "actors").is_symlink()
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(checkout)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def test_the_wheel_holds_every_module_under_raysessions(wheel: zipfile.ZipFile):
    modules = {name for name in wheel.namelist() if name.endswith(".py")}
    library = {file.relative_to(REPOSITORY) for file in (REPOSITORY / "raysessions").rglob("*.py")}
    actors = {Path("raysessions") / file.relative_to(REPOSITORY) for file in (REPOSITORY / "actors").rglob("*.py")}
    assert modules == {file.as_posix() for file in library | actors}
    assert {"raysessions/actors/model_host.py", "raysessions/actors/engines/vllm.py"} <= modules


def test_the_wheel_puts_nothing_else_at_the_top(wheel: zipfile.ZipFile):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"raysessions"}


def test_the_wheel_says_that_it_is_typed_and_what_vllm_shall_load(wheel: zipfile.ZipFile):
    assert "raysessions/py.typed" in wheel.namelist()
    (entry_points,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    lines = wheel.read(entry_points).decode().split("\n")
    assert lines[lines.index("[vllm.general_plugins]") + 1] == f"raysessions = {PLUGIN}"


def test_an_unpacked_wheel_is_imported_as_the_package_it_is(wheel: zipfile.ZipFile, tmp_path: Path):
    wheel.extractall(tmp_path / "site")
    script = "import raysessions.actors.op_queue as module; print(module.__file__)"
    told = tell(script, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "site")})
    assert Path(told) == tmp_path / "site" / "raysessions" / "actors" / "op_queue.py"


def test_a_copy_that_follows_the_link_works_as_a_ray_working_dir(tmp_path: Path):
    # Ray zips a working_dir with links followed, unpacks it on each node and puts it on PYTHONPATH.
    working_dir, elsewhere = tmp_path / "working_dir", tmp_path / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(REPOSITORY / "raysessions", working_dir / "raysessions", ignore=shutil.ignore_patterns("__pycache__"))
    assert not (working_dir / "raysessions" / "actors").is_symlink()
    script = "import raysessions, raysessions.actors.op_queue as module; print(raysessions.__file__); print(module.__file__)"
    told = tell(script, cwd=elsewhere, env={"PYTHONPATH": str(working_dir)}).splitlines()
    package = working_dir / "raysessions"
    assert [Path(line) for line in told] == [package / "__init__.py", package / "actors" / "op_queue.py"]


def test_the_editable_install_names_the_plugin_and_imports_this_checkout():
    distribution = importlib.metadata.distribution("raysessions")
    plugins = distribution.entry_points.select(group="vllm.general_plugins", name="raysessions")
    assert {plugin.value for plugin in plugins} == {PLUGIN}
    assert distribution.version == raysessions.__version__
    assert Path(raysessions.actors.__file__).resolve() == REPOSITORY / "actors" / "__init__.py"
