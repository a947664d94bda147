"""Weights that stay quantised give the tokens of the dequantised ones, on every mesh, at a fraction
of the memory."""

import numpy as np
import pytest

from jaxserve.engine.memory import sizes
from jaxserve.kernels.cpu import library
from tests.engine.harness import Runner, engine
from tests.weights.models import TINY, tensors, write_gguf
from tests.weights.test_kept import KINDS, MODELS

pytestmark = pytest.mark.skipif(
    library.unavailable() is not None, reason="weights stay quantised where kernels are compiled"
)
SMALL = dict(chunk=32, seqs=2, pages=64, max_len=256)


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")

    def file(model: str, kind: str):
        config = MODELS[model]
        values = {
            name: value / np.sqrt(value.shape[-1]) * 2 if value.ndim > 1 else value
            for name, value in tensors(config).items()
        }
        return write_gguf(folder / f"{model}-{kind}.gguf", config, values, KINDS[kind])

    return file


def answers(file, mesh: str, quantization: str) -> tuple[list[list[int]], int]:
    """Greedy tokens, and bytes of weights on a device."""
    real = engine(file, mesh, quantization=quantization, **SMALL)
    try:
        runner = Runner(real)
        prompts = [range(3, 3 + 7 * length, 7) for length in (40, 5)]
        ids = [runner.submit([*prompt], max_tokens=8, ignore_eos=True) for prompt in prompts]
        runner.run()
        return [runner.ids(id) for id in ids], sizes(real.worker.plan).weights
    finally:
        real.close()


@pytest.mark.parametrize(
    "model, kind, mesh",
    [
        ("tied", "mixed", "spp=2"),
        ("dense", "mixed", "spp=2,kvp=2,tp=2"),
        ("experts", "Q8_0", "tp=2"),
    ],
)
def test_tokens_are_those_of_the_dequantised_weights(model, kind, mesh, file_of):
    file = file_of(model, kind)
    right, whole = answers(file, "", "none")
    found, nbytes = answers(file, mesh, "auto")
    assert found == right
    assert nbytes < 0.5 * whole


def test_what_cannot_stay_quantised_is_said_once_for_all_stages(tmp_path, caplog):
    file = write_gguf(tmp_path / "m.gguf", TINY, tensors(TINY), "Q8_0")
    engine(file, "spp=2,tp=4", **SMALL).close()
    assert caplog.text.count("layers.*.attention.o_proj cannot stay quantised") == 1
