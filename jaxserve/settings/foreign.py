"""Flags that people know from other engines (vLLM, SGLang) and that are no settings here: those
that ask for what is so anyway, and what to give instead of others. Names that are settings under
another name are in `renamed.ALIASES`."""

from __future__ import annotations

from collections.abc import Mapping

# flag -> why it has no effect; with a value where it takes one
NO_EFFECT: Mapping[str, str] = {
    "enable_chunked_prefill": "prompts are always computed in chunks",
    "enable_auto_tool_choice": "calls of tools are always read",
    "enable_reasoning": "reasoning is always split from the answer",
    "trust_remote_code": "nothing from a checkpoint is ever executed",
    "disable_log_requests": "prompts and outputs are never logged",
    "enable_log_requests": "requests are logged without prompts and outputs",
    "disable_log_stats": "figures are at /metrics, not in the log",
    "disable_custom_all_reduce": "XLA chooses how devices talk to each other",
    "disable_frontend_multiprocessing": "the ports and the engine are one process",
    "allow_credentials": "keys are sent in a header, never as cookies",
    "enforce_eager": "steps are always compiled",
    "async_scheduling": "--lookahead steps are always issued ahead",
    "enable_prompt_tokens_details": "usage always has them",
    "enable_server_load_tracking": "/load is always there",
    "fully_sharded_loras": "how factors of adapters are split follows from the weights",
}
NO_EFFECT_VALUES: Mapping[str, str] = {
    "allowed_methods": "pages of --allowed-origins may use all that routes have",
    "allowed_headers": "pages of --allowed-origins may send all headers",
    "distributed_executor_backend": "processes of a replica are started by `jaxserve launch`",
    "load_format": "the format follows from the files",
    "max_parallel_loading_workers": "weights are read by as many threads as there are cores",
    "tokenizer_mode": "the tokenizer follows from the checkpoint's files",
    "max_seq_len_to_capture": "steps of all lengths are compiled",
    "block_manager_version": "there is one",
    "uvicorn_log_level": "there is no uvicorn; --log_level is for all of the log",
    "optimization_level": "steps are always compiled with all optimisations",
    "lora_dtype": "adapters have the type of the weights",
}
# flag -> setting and its value, unless that is given too
STANDS_FOR: Mapping[str, tuple[str, str]] = {"enable_lora": ("max_loras", "1")}
# flag -> what to give instead
INSTEAD: Mapping[str, str] = {
    "data_parallel_size": "start `jaxserve cluster --mixed=N`, one address before N replicas",
    "dp": "start `jaxserve cluster --mixed=N`, one address before N replicas",
    "decode_context_parallel_size": "--context-parallel-size=N, lanes for prefill and decode",
    "dcp": "--context-parallel-size=N, lanes for prefill and decode",
    "nnodes": "start the same `jaxserve launch` on every host: docs/multihost.md",
    "swap_space": "--host-cache-gib=GIB: KV that leaves the devices goes there",
    "cpu_offload_gb": "weights stay on the devices; --host-cache-gib=GIB is for KV",
    "kv_transfer_config": "`jaxserve cluster --prefill=N --decode=N`: docs/cluster.md",
    "kv_events_config": "--kv-events=tcp://127.0.0.1:5557: docs/routers.md",
    "load_in_8bit": "weights are read in the types of the checkpoint",
    "speculative_config": "--drafts=ngram, or --drafts=model or eagle3 and --draft-model=NAME",
    "sc": "--drafts=ngram, or --drafts=model or eagle3 and --draft-model=NAME",
    "num_speculative_tokens": "--draft-tokens=N, with --drafts",
    "speculative_model": "--drafts=model or eagle3, and --draft-model=NAME",
    "tokenizer": "the tokenizer must lie beside the weights: give a folder as the model",
    "chat_template": "put chat_template.jinja into the model's folder",
    "tokenizer_revision": "--revision=REVISION is for weights and tokenizer",
    "hf_token": "set the variable HF_TOKEN",
    "download_dir": "set the variable HF_HOME to the folder, or HF_HUB_CACHE",
    "seed": "requests have seeds of their own",
    "device": "set the variable JAX_PLATFORMS, such as cpu or cuda",
    "task": "text is generated; there is no other task",
    "runner": "text is generated; there is no other task",
    "scheduling_policy": "--policy=fcfs, or --policy=slack, which heeds priorities and objectives",
    "preemption_mode": "sequences that lost their pages are computed again",
    "guided_decoding_backend": "there is one; see docs/structured_output.md",
    "structured_outputs_config": "there is one backend; see docs/structured_output.md",
    "max_logprobs": "requests may ask for 20",
    "max_log_len": "prompts are never logged",
    "root_path": "let the proxy strip the prefix",
    "middleware": "put a proxy before the server",
    "uds": "give --host and --port",
    "rope_scaling": "it is read from the checkpoint's config.json: change it there",
    "rope_theta": "it is read from the checkpoint's config.json: change it there",
    "hf_overrides": "change the checkpoint's config.json",
    "limit_mm_per_prompt": "prompts are text only",
    "mm_processor_kwargs": "prompts are text only",
    "default_mm_loras": "prompts are text only",
    "lora_target_modules": "adapters change the modules that their files name",
    "compilation_config": "steps are always compiled",
    "sliding_window": "it is read from the checkpoint's config.json",
    "disable_sliding_window": "it is read from the checkpoint's config.json",
    "num_scheduler_steps": "--lookahead=N steps are issued ahead",
    "long_prefill_token_threshold": "--policy=slack shares steps by what is urgent",
    "max_num_partial_prefills": "--policy=slack shares steps by what is urgent",
    "override_generation_config": "--generation-config=FOLDER, of a generation_config.json",
    "mem_fraction_static": "--gpu-memory-utilization=SHARE",
}


def no_effect(name: str) -> str | None:
    """Returns why a flag of other engines has no effect here; None for one that would have one."""
    return NO_EFFECT.get(name) or NO_EFFECT_VALUES.get(name)
