"""The floors of the house and their directions, read from the imports of every module; the host
tower imports no JAX; axis names have one home; nothing that is loaded can run code."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKED = ("kernels", "sharding", "server")

# Rooms by floor. A room may import rooms of lower floors and, on its own floor, those before it.
HOST = {
    1: (
        "clock",
        "api",
        "policies",
        "drafts",
        "lanes",
        "progress",
        "settings",
        "files",
        "folders",
        "group",
        "checkpoint",
        "text",
        "costs",
    ),
    2: ("cache", "store", "transfer"),
    3: ("scheduling",),
    4: ("observe", "replica"),
    5: ("cluster",),
}
DEVICE = {1: ("kernels",), 2: ("sharding",), 3: ("models",), 4: ("weights",), 5: ("engine",)}
DOORS = {6: ("server", "llm", "cli", "integrations", "lab", "__main__")}
PLACE = {
    room: (floor, place)
    for tower in (HOST, DEVICE, DOORS)
    for floor, rooms in tower.items()
    for place, room in enumerate(rooms)
}
HOST_ROOMS, DEVICE_ROOMS = (
    {room for rooms in tower.values() for room in rooms} for tower in (HOST, DEVICE)
)

AXES = {"spp", "kvp", "tp"}
AXIS_HOMES = {"sharding.mesh", "settings.schema.mesh", "settings.renamed"}  # the last: flags
NO_CLOCK = ("policies", "drafts", "lanes", "cache", "scheduling", "costs")
SIMULATOR = "lab.simulate"  # in the laboratory, and bound like a room of the host tower


@dataclass(frozen=True)
class Module:
    name: str  # without the leading "jaxserve."; "" for the package itself
    path: Path

    @property
    def room(self) -> str:
        return self.name.split(".")[0]

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.path.read_text())

    @functools.cached_property
    def imports(self) -> tuple[str, ...]:
        """Full names of imports, wherever in the file they are."""
        names: list[str] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                names += (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{self.path}: imports are absolute"
                names += (f"{node.module}.{alias.name}" for alias in node.names)
        return tuple(names)


def modules() -> list[Module]:
    found = []
    for folder, _, files in os.walk(ROOT / "jaxserve", followlinks=True):
        for file in files:
            if file.endswith(".py"):
                path = Path(folder) / file
                parts = path.relative_to(ROOT / "jaxserve").with_suffix("").parts
                found.append(
                    Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), path)
                )
    return sorted(found, key=lambda module: module.name)


MODULES = modules()
WRITTEN = [module for module in MODULES if "_pb2" not in module.name]


def rooms_of(module: Module) -> set[str]:
    """Rooms of jaxserve that a module imports, its own left out."""
    names = (name.split(".") for name in module.imports)
    return {
        parts[1]
        for parts in names
        if parts[0] == "jaxserve" and len(parts) > 1 and parts[1] in PLACE
    } - {module.room}


def test_all_modules_are_found():
    assert {
        "",
        "settings.schema",
        "kernels.reference",
        "sharding.attention",
        "server.grpc.inference",
        "engine.engine",
    } <= {module.name for module in MODULES}


def test_every_module_is_in_a_room():
    strangers = {module.room for module in MODULES} - set(PLACE) - {""}
    assert not strangers, f"{strangers} stand on no floor; see HOST, DEVICE, DOORS here"


@pytest.mark.parametrize("module", [m for m in MODULES if m.name], ids=lambda module: module.name)
def test_a_module_imports_only_from_below(module):
    floor, place = PLACE[module.room]
    for room in rooms_of(module):
        below, before = PLACE[room]
        fits = below < floor or (
            below == floor
            and before < place
            and (room in HOST_ROOMS) == (module.room in HOST_ROOMS)
        )
        assert fits, f"{module.name} is on floor {floor} and imports {room} on floor {below}"


def test_the_host_tower_imports_nothing_of_the_device_tower():
    for module in MODULES:
        if module.room in HOST_ROOMS or module.name.startswith(SIMULATOR):
            assert not rooms_of(module) & DEVICE_ROOMS, module.name
            assert not [
                name
                for name in module.imports
                if name.split(".")[0] in ("jax", "jaxlib", "flax", "orbax")
            ], module.name


def test_serving_imports_nothing_of_the_laboratory():
    for module in MODULES:
        if module.room != "lab":
            assert "lab" not in rooms_of(module), module.name


def test_no_room_imports_another_ones_private_names():
    for module in MODULES:
        for name in module.imports:
            parts = name.split(".")
            if parts[0] == "jaxserve" and len(parts) > 2 and parts[1] != module.room:
                assert not parts[-1].startswith("_"), f"{module.name} imports {name}"


def test_host_modules_and_the_front_door_can_be_imported_without_jax():
    light = [
        f"jaxserve.{m.name}"
        for m in WRITTEN
        if m.room in HOST_ROOMS or m.name in ("cli.main", "llm") or m.name.startswith(SIMULATOR)
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {['jaxserve', *light]}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'jax', 'jaxlib', 'flax', 'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'{name} imports {heavy}'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_parts_that_get_time_as_an_argument_have_no_clock_and_no_threads():
    for module in MODULES:
        if module.room in NO_CLOCK or module.name.startswith(SIMULATOR):
            banned = {"time", "datetime", "threading", "asyncio", "logging"} & {
                name.split(".")[0] for name in module.imports
            }
            assert not banned, f"{module.name} imports {banned}"


def test_the_top_folders_are_imported_only_by_way_of_jaxserve():
    bare = re.compile(rf"^\s*(from|import) ({'|'.join(LINKED)})\b", re.MULTILINE)
    files = [path for top in ("tests", "experiments") for path in ROOT.glob(f"{top}/**/*.py")]
    for path in [module.path for module in MODULES] + files:
        assert not bare.search(path.read_text()), path


def test_the_links_are_relative_and_tracked():
    for name in LINKED:
        assert os.readlink(ROOT / "jaxserve" / name) == f"../{name}"
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "-s", *(f"jaxserve/{name}" for name in LINKED)]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
        assert [line.split()[0] for line in listed.splitlines()] == ["120000"] * 3


def test_axis_names_have_one_home():
    for module in WRITTEN:
        if module.name not in AXIS_HOMES:
            literals = {
                node.value
                for node in ast.walk(module.tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            }
            assert not literals & AXES, f"{module.name} spells out {literals & AXES}"


UNSAFE_MODULES = {
    "pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "torch",
}
UNSAFE_MEMBERS = {"os.system", "os.popen", "jinja2.Environment", "jinja2.environment.Environment"}
# and its events and nodes, which are plain data
SAFE_YAML = {
    "yaml.safe_load",
    "yaml.safe_dump",
    "yaml.parse",
    "yaml.SafeLoader",
    "yaml.YAMLError",
    "yaml.MarkedYAMLError",
}
UNSAFE_ARGUMENTS = {"allow_pickle", "shell", "trust_remote_code"}
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__"}


def unsafe_yaml(name: str) -> bool:
    """True if a member of yaml may make objects of a file's choosing."""
    return (
        name.startswith("yaml.") and name not in SAFE_YAML and not name.endswith(("Event", "Node"))
    )


def faults(module: Module) -> Iterator[str]:
    """Places that could turn data into running code."""
    yield from (
        f"imports {name}" for name in module.imports if name.split(".")[0] in UNSAFE_MODULES
    )
    yield from (
        f"imports {name}" for name in module.imports if name in UNSAFE_MEMBERS or unsafe_yaml(name)
    )
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and node.id in UNSAFE_NAMES:
            yield f"uses {node.id}"
        if isinstance(node, ast.alias) and node.name == "yaml" and node.asname:
            yield f"calls yaml {node.asname}"
        if isinstance(node, ast.Attribute) and (
            ast.unparse(node) in UNSAFE_MEMBERS or unsafe_yaml(ast.unparse(node))
        ):
            yield f"uses {ast.unparse(node)}"
        if (
            isinstance(node, ast.keyword)
            and node.arg in UNSAFE_ARGUMENTS
            and ast.unparse(node.value) != "False"
        ):
            yield f"gives {node.arg}"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch",
        "def f():\n  import marshal",
        "eval('1')",
        "f = exec",
        "os.system('ls')",
        "np.load(f, allow_pickle=True)",
        "subprocess.run('ls', shell=True)",
        "from jinja2 import Environment",
        "jinja2.Environment()",
        "yaml.load(f, Loader=yaml.SafeLoader)",
        "yaml.unsafe_load(f)",
        "yaml.full_load(f)",
        "f(Loader=yaml.UnsafeLoader)",
        "from yaml import load",
        "from yaml import *",
        "import yaml as y",
        "from yaml.loader import Loader",
        "import yaml.constructor",
        "yaml.loader.Loader(f)",
    ],
)
def test_what_could_run_code_is_recognised(source, tmp_path):
    (tmp_path / "m.py").write_text(source)
    assert list(faults(Module("m", tmp_path / "m.py")))


def test_the_safe_part_of_yaml_is_no_fault(tmp_path):
    (tmp_path / "m.py").write_text(
        "import yaml\nyaml.safe_load(t)\n"
        "e = yaml.parse(t, Loader=yaml.SafeLoader)\nf = yaml.AliasEvent"
    )
    assert not list(faults(Module("m", tmp_path / "m.py")))


def test_nothing_that_is_loaded_can_run_code():
    found = {module.name: list(faults(module)) for module in WRITTEN}
    assert not {name: what for name, what in found.items() if what}
