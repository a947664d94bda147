"""Weights that change while serving: no answer is of two versions, none is lost, and what sleeps
holds no memory."""

from __future__ import annotations

import itertools
import json
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve.api.errors import RequestError
from jaxserve.api.events import Event, Finished, Token
from jaxserve.api.request import Continuation, Request
from jaxserve.api.sampling import SamplingParams
from jaxserve.engine.engine import Engine
from jaxserve.kernels.cpu import library
from jaxserve.weights.sources import empty
from tests.engine.adapters import merge, write_adapter
from tests.engine.groups import led
from tests.engine.harness import Runner, assert_empty, engine, generate
from tests.engine.weights import FILE, PROMPTS, further, live_bytes, resident_bytes, trained
from tests.models.test_families import write_model
from tests.waiting import SOON, eventually

SIZE = dict(chunk=32, seqs=4, pages=96, max_len=256)
TOKENS = 8
ALL_AXES = "spp=2,kvp=2,tp=2"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Folders of one model with weights a and b."""
    folder = tmp_path_factory.mktemp("weights")
    base = write_model(folder / "a", "granite")
    return {"a": base, "b": trained(folder / "b", base, 1)}


def answers(real: Engine, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return generate(real, prompts, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def right(folders) -> dict[str, list[list[int]]]:
    """Returns the answers of engines that began with the weights of each folder."""
    found = {}
    for name, folder in folders.items():
        real = engine(str(folder), **SIZE)
        found[name] = answers(real)
        real.close()
    assert all(a != b for a, b in zip(found["a"], found["b"]))
    return found


@pytest.fixture
def real(folders) -> Iterator[Engine]:
    real = engine(str(folders["a"]), **SIZE)
    yield real
    real.close()


def versions(runner: Runner, ids: list[str]) -> list[str]:
    return [runner.completion(id).finished.weight_version for id in ids]


@pytest.mark.parametrize("updates", [6, pytest.param(20, marks=pytest.mark.matrix)])
def test_no_answer_under_load_is_of_two_versions_and_none_is_lost(updates, real, folders, right):
    """Threads that ask all the time, while the weights alternate: each answer is the whole one of
    the version that it names."""
    asked: list[tuple[int, str, list[int]]] = []
    over = threading.Event()

    def ask(thread: int) -> None:
        for number in itertools.count(thread):
            if over.is_set():
                return
            which = number % len(PROMPTS)
            asked.append((which, *whole_answer(real, f"{thread}-{number}", PROMPTS[which])))

    of_version = {"1": "a"}
    threads = [threading.Thread(target=ask, args=(i,)) for i in range(6)]
    real.start()
    for thread in threads:
        thread.start()
    for number in range(updates + 1):
        before = len(asked)
        eventually(lambda count=before: len(asked) >= count + 6)
        if number < updates:
            name = "ba"[number % 2]
            of_version[real.weights.update(str(folders[name]))] = name
    over.set()
    for thread in threads:
        thread.join()
    assert_empty(real)
    for number, version, ids in asked:
        assert ids == right[of_version[version]][number]
    assert {version for _, version, _ in asked} == {str(1 + n) for n in range(updates + 1)}


def whole_answer(real: Engine, id: str, prompt: list[int]) -> tuple[str, list[int]]:
    """The version and the tokens of a running engine's greedy answer."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    request = Request.make(
        id, prompt, params, vocab=real.info.vocab, max_len=256, arrival=real.now()
    )
    heard: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
    real.submit(request, heard.put)
    ids: list[int] = []
    while True:
        for event in heard.get(timeout=SOON):
            if isinstance(event, Token):
                ids.append(event.id)
            elif isinstance(event, Finished):
                assert event.reason == "length"
                return event.weight_version, ids


def begun_and_waiting(real: Engine) -> tuple[Runner, list[str], list[str]]:
    """Requests of which four have put out a token, and two wait for a slot."""
    runner = Runner(real)
    fields = dict(max_tokens=TOKENS, ignore_eos=True)
    begun = [runner.submit(prompt, **fields) for prompt in PROMPTS]
    while not all(any(hasattr(e, "id") for e in runner.events[id]) for id in begun):
        real.step()
    waiting = [runner.submit(prompt, **fields) for prompt in PROMPTS[:2]]
    return runner, begun, waiting


def beside(real: Engine, change) -> None:
    """Makes a change on another thread, as callers do, while steps run on this one, from when it
    has requests held back."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            change()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    admission = real.scheduler.page_admission
    allows = admission.allows
    thread.start()
    eventually(lambda: admission.allows is not allows or not thread.is_alive())
    while thread.is_alive():
        if not real.step():
            time.sleep(0.001)
        real.scheduler.check()
    thread.join()
    if errors:
        raise errors[0]


def test_requests_that_have_begun_finish_with_the_weights_of_before(real, folders, right):
    runner, begun, waiting = begun_and_waiting(real)
    beside(real, lambda: real.weights.update(str(folders["b"])))
    assert [runner.ids(id) for id in begun] == right["a"]
    assert versions(runner, begun) == ["1"] * 4
    runner.run()
    assert [runner.ids(id) for id in waiting] == right["b"][:2]
    assert versions(runner, waiting) == ["2"] * 2
    assert_empty(real)


def test_requests_that_have_begun_may_be_aborted(real, folders, right):
    runner, begun, waiting = begun_and_waiting(real)
    beside(real, lambda: real.weights.update(str(folders["b"]), "step 7", "abort"))
    for id, whole in zip(begun, right["a"]):
        ended = runner.completion(id)
        assert ended.finished.reason == "cancelled"
        assert ended.finished.weight_version == "1"
        assert ended.ids == whole[: len(ended.ids)]
    runner.run()
    assert [runner.ids(id) for id in waiting] == right["b"][:2]
    assert versions(runner, waiting) == ["step 7"] * 2


def test_completions_of_one_request_are_of_one_version(real, folders, right):
    """Also those that have not begun when others of the request have."""
    runner = Runner(real)
    id = runner.submit(PROMPTS[0], n=6, max_tokens=TOKENS, ignore_eos=True)
    for _ in range(3):
        real.step()
    beside(real, lambda: real.weights.update(str(folders["b"])))
    assert [runner.ids(id, index) for index in range(6)] == [right["a"][0]] * 6
    assert_empty(real)


def test_a_pause_keeps_requests_where_they_are(real, right):
    runner, begun, waiting = begun_and_waiting(real)
    beside(real, lambda: real.weights.pause("keep"))
    assert real.weights.state == "paused"
    heard = {id: len(runner.events[id]) for id in [*begun, *waiting]}
    late = runner.submit(PROMPTS[2], max_tokens=TOKENS, ignore_eos=True)
    for _ in range(20):
        assert not real.step()
    assert all(len(runner.events[id]) == count for id, count in heard.items())
    real.weights.resume()
    runner.run()
    assert [runner.ids(id) for id in begun] == right["a"]
    assert [runner.ids(id) for id in waiting] == right["a"][:2]
    assert runner.ids(late) == right["a"][2]


@pytest.mark.parametrize("mode, reason", [("abort", "cancelled"), ("finish", "length")])
def test_a_pause_ends_requests_or_lets_them_end(mode, reason, real, right):
    runner, begun, waiting = begun_and_waiting(real)
    beside(real, lambda: real.weights.pause(mode))
    assert [runner.completion(id).finished.reason for id in begun] == [reason] * 4
    for _ in range(20):
        assert not real.step()
    assert real.load().waiting == 2 and not real.load().running
    real.weights.resume()
    runner.run()
    assert [runner.ids(id) for id in waiting] == right["a"][:2]


def test_a_request_goes_on_only_with_the_weights_that_it_began_with(real, folders, right):
    """One that another replica has begun, which was lost then."""
    runner = Runner(real)
    fields = dict(max_tokens=TOKENS, ignore_eos=True)
    begun = Continuation({0: right["a"][0][:3]}, real.now(), "1")
    id = runner.submit(PROMPTS[0], rest={"continuation": begun}, **fields)
    runner.run()
    assert runner.ids(id) == right["a"][0][3:]
    real.weights.update(str(folders["b"]))
    with pytest.raises(
        RequestError, match="has tokens of weights '1', and '2' are served"
    ) as error:
        runner.submit(PROMPTS[0], rest={"continuation": begun}, **fields)
    assert error.value.status == "UNAVAILABLE"  # a conductor asks the next replica
    real.weights.pause("keep")
    begun = Continuation({0: right["b"][0][:3]}, real.now(), "2")
    id = runner.submit(PROMPTS[0], rest={"continuation": begun}, **fields)
    beside(real, lambda: real.weights.update(str(folders["a"]), mode="abort"))
    assert runner.completion(id).finished.reason == "cancelled"


def test_an_update_ends_no_pause(real, folders, right):
    real.weights.pause()
    real.weights.update(str(folders["b"]))
    runner = Runner(real)
    id = runner.submit(PROMPTS[0], max_tokens=TOKENS, ignore_eos=True)
    assert not real.step() and real.weights.state == "paused"
    real.weights.resume()
    runner.run()
    assert runner.ids(id) == right["b"][0]


def test_requests_that_were_kept_finish_before_an_update(real, folders, right):
    runner, begun, waiting = begun_and_waiting(real)
    beside(real, lambda: real.weights.pause("keep"))
    beside(real, lambda: real.weights.update(str(folders["b"]), mode="finish"))
    assert [runner.ids(id) for id in begun] == right["a"]
    real.weights.resume()
    runner.run()
    assert [runner.ids(id) for id in waiting] == right["b"][:2]


def cached(real: Engine, prompt: list[int]) -> int:
    runner = Runner(real)
    id = runner.submit(prompt, max_tokens=TOKENS, ignore_eos=True)
    runner.run()
    return runner.completion(id).finished.usage.cached


@pytest.mark.parametrize("below", [False, True])
def test_no_prefix_of_other_weights_is_found(below, folders, right, tmp_path):
    """On the devices, in host memory or on disk, which also outlasts the engine."""
    settings = dict(host_cache_gib=0.01, disk_cache=f"{tmp_path}:0.1") if below else {}
    real = engine(str(folders["a"]), **SIZE, **settings)
    assert cached(real, PROMPTS[0]) == 0
    if below:
        real.close()
        real = engine(str(folders["a"]), **SIZE, **settings)
    assert cached(real, PROMPTS[0]) > 0
    before = real.info.cache_fingerprint
    real.weights.update(str(folders["b"]))
    assert real.info.cache_fingerprint != before
    assert cached(real, PROMPTS[0]) == 0
    assert cached(real, PROMPTS[0]) > 0
    assert answers(real) == right["b"]
    real.weights.update(str(folders["a"]))
    assert cached(real, PROMPTS[0]) == 0  # of version 3, though the weights are those of 1
    assert answers(real) == right["a"]
    real.close()
    if below:
        again = engine(str(folders["a"]), **SIZE, **settings)
        assert cached(again, PROMPTS[0]) > 0  # what version 1 has kept
        assert answers(again) == right["a"]
        again.close()


def test_arrays_of_this_process_are_weights(real, folders, right):
    arrays = {}
    for name, value in load_file(folders["b"] / FILE).items():
        arrays[name] = empty(value.shape, value.dtype)  # where devices could take it over as it is
        arrays[name][...] = value
    real.weights.update(arrays)
    for array in arrays.values():
        array[...] = 0  # what is served is a copy
    assert answers(real) == right["b"]
    real.weights.update({name: _on_device(a) for name, a in load_file(folders["a"] / FILE).items()})
    assert answers(real) == right["a"]


def _on_device(array: np.ndarray):
    import jax

    return jax.device_put(array)


WRITER = """
import sys, numpy as np
from safetensors.numpy import load_file, save_file
source, target = sys.argv[1:]
save_file(load_file(source), target)
print("written", flush=True)
sys.stdin.readline()
with open(target, "r+b") as file:  # in place, as a trainer might
    file.seek(-4096, 2)
    file.write(bytes(4096))
    size = file.tell()
values = np.memmap(target, np.uint8, "r+")
values[len(values) // 2 :] = 0
values.flush()
"""


def test_weights_in_shared_memory_come_from_another_process(real, folders, right):
    """As a folder in /dev/shm. What its owner writes there later does not reach what is served."""
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as shared:
        shutil.copy(folders["b"] / "config.json", shared)
        command = [sys.executable, "-c", WRITER, str(folders["b"] / FILE), f"{shared}/{FILE}"]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as trainer:
            assert trainer.stdout is not None
            assert trainer.stdout.readline() == "written\n"
            real.weights.update(shared)
            trainer.communicate("\n", timeout=60)
        assert trainer.returncode == 0
        assert answers(real) == right["b"]


def refused(real: Engine, source, fault: str, **fields) -> None:
    with pytest.raises(RequestError, match=fault):
        real.weights.update(source, **fields)


def test_what_cannot_take_their_place_is_refused(real, folders, right, tmp_path):
    weights = load_file(folders["b"] / FILE)
    name = "model.layers.0.mlp.down_proj.weight"
    refused(real, str(tmp_path / "nowhere"), "there is no")
    refused(real, str(tmp_path), "neither a .gguf file nor a config.json")
    refused(real, {k: v for k, v in weights.items() if k != name}, f"1 missing: {name}")
    refused(real, {**weights, name: weights[name].T.copy()}, "1 misshaped")
    refused(real, {**weights, "model.layers.9.x": weights[name]}, "1 unexpected")
    refused(real, {**weights, name: weights[name].astype(np.int8)}, "no array of floats but int8")
    refused(real, {**weights, name: [1.0]}, "no array of floats but list")
    other = shutil.copytree(folders["b"], tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (other / "config.json").write_text(json.dumps(config))
    refused(real, str(other), "of another model: layers is")
    shutil.copy(folders["b"] / "config.json", other)
    (other / FILE).write_bytes((folders["b"] / FILE).read_bytes()[:-100])
    refused(real, str(other), "past the end|truncated|end at byte")
    refused(real, str(folders["b"]), "cannot be keep", mode="keep")
    refused(real, str(folders["b"]), "must be one of", mode="soon")
    refused(real, str(folders["b"]), "'1' is served already", version="1")
    refused(real, str(folders["b"]), "1 to 200 characters", version="x" * 201)
    refused(real, str(folders["b"]), "1 to 200 characters", version="a\n")
    assert real.weights.version == "1" and real.weights.state == "running"
    assert answers(real) == right["a"]


def test_versions_count_up_from_the_newest_number(real, folders):
    give = [None, "10", None, "best", None]
    names = [real.weights.update(str(folders["b"]), version) for version in give]
    assert names == ["2", "10", "11", "best", "12"]


def test_without_room_beside_them_weights_are_read_in_place(real, folders, right, monkeypatch):
    monkeypatch.setattr("jaxserve.engine.stage_weights.has_room", lambda shapes: False)
    peak = []
    read = real.worker.stages.read_weights
    monkeypatch.setattr(
        real.worker.stages, "read_weights", lambda load: (peak.append(live_bytes()), read(load))[1]
    )
    assert answers(real) == right["a"]
    whole = live_bytes()
    real.weights.update(str(folders["b"]))
    assert answers(real) == right["b"]
    assert peak[0] < whole - sum(a.nbytes for a in load_file(folders["a"] / FILE).values()) // 2


def test_weights_that_are_lost_in_place_must_be_given_again(real, folders, right, monkeypatch):
    monkeypatch.setattr("jaxserve.engine.stage_weights.has_room", lambda shapes: False)
    stages = real.worker.stages
    with monkeypatch.context() as patch:
        patch.setattr(stages, "read_weights", lambda load: _fail())
        with pytest.raises(RequestError, match="cannot be read"):
            real.weights.update(str(folders["b"]))
    assert real.weights.state == "asleep"
    runner = Runner(real)
    id = runner.submit(PROMPTS[0], max_tokens=TOKENS, ignore_eos=True)
    assert not real.step()
    with pytest.raises(RequestError, match="there are no weights: update them"):
        real.weights.wake_up()
    real.weights.update(str(folders["b"]))
    runner.run()
    assert runner.ids(id) == right["b"][0]


def _fail() -> None:
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    "mesh", ["", ALL_AXES, *(pytest.param(m, marks=pytest.mark.matrix) for m in ("tp=2", "spp=2"))]
)
def test_sleep_frees_the_devices(mesh, folders, right):
    before = live_bytes()
    real = engine(str(folders["a"]), mesh=mesh, **SIZE)
    awake = answers(real)
    held = live_bytes() - before
    real.weights.sleep(1)
    assert real.weights.state == "asleep"
    assert live_bytes() - before < 0.01 * held
    with pytest.raises(RequestError, match="wake it up"):
        real.weights.resume()
    runner = Runner(real)
    id = runner.submit(PROMPTS[0], max_tokens=TOKENS, ignore_eos=True)
    assert not real.step()
    real.weights.wake_up(["weights"])
    assert real.weights.state == "asleep" and not real.step()
    real.weights.wake_up(["kv_cache"])
    runner.run()
    assert runner.ids(id) == awake[0] == right["a"][0]
    assert runner.completion(id).finished.usage.cached == 0
    assert answers(real) == awake
    real.weights.sleep(2)
    assert live_bytes() - before < 0.01 * held
    with pytest.raises(RequestError, match="there are no weights: update them"):
        real.weights.wake_up()
    real.weights.update(str(folders["b"]))
    assert real.weights.state == "asleep"
    real.weights.wake_up()
    assert answers(real) == right["b"]
    real.close()


def test_requests_that_are_kept_begin_again_after_sleep(real, folders, right):
    """With the same weights: with others they must end."""
    runner, begun, waiting = begun_and_waiting(real)
    beside(real, lambda: real.weights.sleep(1, "keep"))
    with pytest.raises(RequestError, match="none ends in sleep"):
        real.weights.update(str(folders["b"]), mode="finish")
    with pytest.raises(RequestError, match="cannot be keep"):
        real.weights.sleep(2, "keep")
    for level, fault in ((0, "must be 1 or 2"), (3, "must be 1 or 2")):
        with pytest.raises(RequestError, match=fault):
            real.weights.sleep(level)
    with pytest.raises(RequestError, match="'kv' is none of"):
        real.weights.wake_up(["kv"])
    real.weights.wake_up()
    runner.run()
    assert [runner.ids(id) for id in begun] == right["a"]
    assert [runner.ids(id) for id in waiting] == right["a"][:2]


@pytest.mark.parametrize(
    "mesh", [ALL_AXES, *(pytest.param(m, marks=pytest.mark.matrix) for m in ("kvp=2", "tp=2"))]
)
def test_weights_are_exchanged_on_every_mesh(mesh, folders, right):
    real = engine(str(folders["a"]), mesh=mesh, **SIZE)
    assert answers(real) == right["a"]
    real.weights.update(str(folders["b"]))
    assert answers(real) == right["b"]
    real.weights.update(load_file(folders["a"] / FILE))
    assert answers(real) == right["a"]
    real.close()


@pytest.mark.skipif(
    library.unavailable() is not None, reason="weights stay quantised where kernels are compiled"
)
def test_weights_that_stay_quantised_are_exchanged(tmp_path):
    """By others that are quantised alike, and by no others."""
    base = write_model(tmp_path / "a", "granite")
    other = trained(tmp_path / "b", base, 2)
    whole = engine(str(other), quantization="int8", **SIZE)
    expected = answers(whole)
    whole.close()
    real = engine(str(base), quantization="int8", **SIZE)
    kept = dict(real.worker.plan.kept)
    assert kept
    assert answers(real) != expected
    real.weights.update(str(other))
    assert answers(real) == expected
    real.weights.sleep(1)
    real.weights.wake_up()
    assert answers(real) == expected
    real.close()


def test_adapters_are_added_to_the_new_weights(folders, tmp_path):
    """They stay loaded: those of the old weights are to be replaced by their owner."""
    adapter = write_adapter(tmp_path / "adapter", folders["a"])
    rest = {}
    real = engine(str(folders["a"]), loras=2, **SIZE)
    rest["adapter"] = real.adapters.load("one", str(adapter)).identity

    def adapted(some: Engine, rest: dict) -> list[list[int]]:
        runner = Runner(some)
        fields = dict(max_tokens=TOKENS, ignore_eos=True)
        ids = [runner.submit(prompt, rest=rest, **fields) for prompt in PROMPTS]
        runner.run()
        return [runner.ids(id) for id in ids]

    before = adapted(real, rest)
    for change in (
        lambda: real.weights.update(str(folders["b"])),
        lambda: (real.weights.sleep(1), real.weights.wake_up()),
    ):
        change()
        merged = merge(tmp_path / f"merged-{len(list(tmp_path.iterdir()))}", folders["b"], adapter)
        alone = engine(str(merged), **SIZE)
        assert adapted(real, rest) == answers(alone) != before
        alone.close()
    real.close()


@pytest.mark.parametrize(
    "mesh, processes",
    [("spp=2", 2), pytest.param("kvp=2", 2, marks=pytest.mark.matrix)],
)
def test_a_group_of_processes_exchanges_its_weights(
    mesh, processes, folders, right, monkeypatch, tmp_path
):
    settings = dict(chunk_tokens=32, max_seqs=4, pages=96, max_model_len=256)
    moved = shutil.copytree(folders["b"], tmp_path / "b")
    with led(monkeypatch, str(folders["a"]), mesh, processes, **settings) as (real, workers):
        assert answers(real) == right["a"]
        refused(real, load_file(folders["b"] / FILE), "write them to a folder")
        refused(real, str(tmp_path / "nowhere"), "worker 0: there is no")
        real.weights.update(str(moved))
        assert answers(real) == right["b"]
        real.weights.sleep(1)
        real.weights.wake_up()
        assert answers(real) == right["b"]
        workers.processes[1].kill()  # what comes in its place has the newest weights too
        workers.processes[1].wait()
        eventually(lambda: _lost(real))
        for number in range(processes):
            workers.processes[number].wait(60)
            workers.start(number)
        real.worker.formed()
        real.steps.lose(lambda sequence: True, RequestError("", "workers were lost"))
        real.steps.reset_devices()
        real.available = True
        assert answers(real) == right["b"]
        assert real.weights.version == "2"


def _lost(real: Engine) -> bool:
    from jaxserve.engine.command import WorkersLost

    try:
        real.worker.check()
    except WorkersLost:
        return True
    return False


@pytest.mark.matrix
def test_a_hundred_updates_leave_memory_flat(folders, right, tmp_path):
    big = write_model(tmp_path / "a", "granite")
    weights = further(big, 3)
    save_file(weights, big / FILE)
    other = trained(tmp_path / "b", big, 4)
    real = engine(str(big), **SIZE)

    def lap(count: int) -> tuple[int, int]:
        for number in range(count):
            real.weights.update(str((other, big)[number % 2]))
            answers(real, PROMPTS[:2])
        return live_bytes(), resident_bytes()

    live, resident = lap(10)
    after = [lap(50) for _ in range(2)]
    assert [one for one, _ in after] == [live, live]
    assert all(one - resident < 20 * 2**20 for _, one in after)
    real.close()
