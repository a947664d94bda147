"""A pytest plugin for vLLM's tests: their server is the one that runs already, and their tokenizer
the one in CHECK_TOKENIZER. No test and no assertion is changed."""

from __future__ import annotations

import os
import urllib.parse
from typing import Any

import vllm_command  # noqa: F401  before vllm, which asks for its version

# isort: split
import transformers
import vllm.tokenizers
from vllm.transformers_utils import repo_utils

from tests import utils

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
