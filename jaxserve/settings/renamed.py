"""Other spellings of settings and of their values: those of other engines, which work as our own
do, and old ones, each of which works for one more version, with a warning.

The tables here are the only places where they are known. Flags, variables of the environment,
settings files and keyword arguments all come through `current_name` and `current_value`. Dashes
and underscores in a name are alike.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

ALIASES: Mapping[str, str] = {  # as in vLLM or SGLang -> name
    "tp": "tensor_parallel_size",
    "tp_size": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "cp": "context_parallel_size",
    "http_port": "port",
    "max_num_seqs": "max_seqs",
    "max_running_requests": "max_seqs",
    "max_num_batched_tokens": "chunk_tokens",
    "chunked_prefill_size": "chunk_tokens",
    "context_length": "max_model_len",
    "q": "quantization",
    "model_path": "model",
    "enable_prefix_caching": "prefix_caching",
    "num_gpu_blocks_override": "pages",
    "page_size": "block_size",
    "ssl_certfile": "tls_cert",
    "ssl_keyfile": "tls_key",
    "ssl_ca_certs": "tls_client_ca",
    "otlp_traces_endpoint": "traces_endpoint",
    "spec_method": "drafts",
    "spec_model": "draft_model",
    "spec_tokens": "draft_tokens",
}
# settings whose flag may be followed by several values
SEVERAL = ("served_model_name", "lora_modules")
VALUE_ALIASES: Mapping[str, Mapping[str, str]] = {  # setting -> as in vLLM -> value
    "dtype": {"half": "float16", "float": "float32", "fp16": "float16", "bf16": "bfloat16"},
    "kv_cache_dtype": {"fp8_e4m3": "fp8"},
    # the format of a checkpoint is known from its files
    "quantization": dict.fromkeys(
        (
            "gguf",
            "gptq",
            "gptq_marlin",
            "awq",
            "awq_marlin",
            "compressed-tensors",
            "mxfp4",
            "modelopt",
            "fbgemm_fp8",
        ),
        "auto",
    ),
    "tool_call_parser": {
        "llama3_json": "llama3",
        "llama4_json": "llama3",
        "llama4_pythonic": "pythonic",
        "qwen": "hermes",
        "qwen25": "hermes",
        "qwen3_json": "hermes",
        "ernie45": "hermes",
        "granite4": "hermes",
        "qwen3_xml": "qwen3_coder",
        "step3p5": "qwen3_coder",
        "glm45": "glm",
        "glm47": "glm",
        "ling3": "glm",
        "poolside_v1": "glm",
        "jamba": "hunyuan_a13b",
        "deepseekv3": "deepseek_v3",
        "deepseekv31": "deepseek_v31",
        "deepseekv32": "deepseek_v32",
        "deepseek_v4": "deepseek_v32",
        "deepseek_v41": "deepseek_v32",
        "deepseekv4": "deepseek_v32",
        "deepseekv41": "deepseek_v32",
        "minimax-m2": "minimax_m2",
        "cohere_command4": "cohere_command3",
        "minimax-m3": "minimax_m3",
        "hy_v4": "hy_v3",
        "hunyuan": "hy_v3",
        "openai": "harmony",
        "gpt-oss": "harmony",
    },
    "reasoning_parser": {
        "deepseek_r1": "think",
        "deepseek-r1": "think",
        "deepseek_v3": "think",
        "deepseek-v3": "think",
        "deepseek_v4": "think",
        "deepseek_v41": "think",
        "qwen3": "think",
        "glm45": "think",
        "glm47": "think",
        "kimi_k2": "think",
        "minimax_m2": "think",
        "minimax": "think",
        "nemotron_v3": "think",
        "olmo3": "think",
        "step3": "think",
        "seed_oss": "seed",
        "cohere_command4": "cohere_command3",
        "hy_v4": "hy_v3",
        "hunyuan": "hy_v3",
        "openai_gptoss": "harmony",
        "gpt-oss": "harmony",
    },
}
FLAGS: Mapping[str, str] = {  # old name -> name
    "rates": "qps",
    "prompt_len": "prompt",
    "output_len": "output",
    "replicas_ca": "cluster_ca",
}
VALUES: Mapping[str, Mapping[str, str]] = {  # setting -> old value -> value
    # the papers' LRS is the least relative slack, --policy=relative-slack or slack
    "policy": {"lrs": "llf"}
}


def spelt(name: str) -> str:
    """A name in our spelling."""
    name = name.replace("-", "_")
    return ALIASES.get(name, name)


def current_name(name: str) -> str:
    """The name of a setting that may be spelt otherwise; an old name is warned of."""
    name = spelt(name)
    if name not in FLAGS:
        return name
    log.warning("%s is now %s; the old name goes with the next version", name, FLAGS[name])
    return FLAGS[name]


def current_value(name: str, value: Any) -> Any:
    """The value of a setting that may be spelt otherwise; an old spelling is warned of."""
    if isinstance(value, str):
        value = VALUE_ALIASES.get(name, {}).get(value, value)
    if not isinstance(value, str) or value not in VALUES.get(name, {}):
        return value
    new = VALUES[name][value]
    log.warning("%s=%s is now %s; the old value goes with the next version", name, value, new)
    return new
