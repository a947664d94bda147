"""Runs in an environment with Tunix: `python tunix_run.py FOLDER`. The rollout of a trainer whose
weights change gives them the log-probabilities that Tunix's own model gives."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3 import params as loader
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig

from jaxserve.integrations.tunix import JaxserveRollout


class Padding:
    """A tokenizer of Tunix, as far as it is asked."""

    def pad_id(self) -> int:
        return 0


def actor_of(folder: Path) -> qwen3.Qwen3:
    config = json.loads((folder / "config.json").read_text())
    sizes = qwen3.ModelConfig(
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        embed_dim=config["hidden_size"],
        hidden_dim=config["intermediate_size"],
        num_heads=config["num_attention_heads"],
        head_dim=config["head_dim"],
        num_kv_heads=config["num_key_value_heads"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
    return loader.create_model_from_safe_tensors(str(folder), sizes, dtype=jnp.float32)


def logps_of(actor: qwen3.Qwen3, prompt: list[int], completion: list[int]) -> np.ndarray:
    """Log-probabilities of a completion by Tunix's own model."""
    ids = jnp.array([prompt + completion])
    length = ids.shape[1]
    positions = jnp.arange(length)[None]
    mask = jnp.tril(jnp.ones((1, length, length), bool))
    logits, _ = actor(ids, positions, None, mask)
    logps = jax.nn.log_softmax(logits[0].astype(jnp.float32))
    at = np.arange(len(prompt) - 1, length - 1)
    return np.asarray(logps)[at, completion]


def assert_same(rollout: JaxserveRollout, actor: qwen3.Qwen3) -> list[list[int]]:
    """Asserts that both give the same log-probabilities; returns what was generated."""
    config = RolloutConfig(max_tokens_to_generate=6, temperature=1.0, seed=jnp.array(3))
    prompts = ["once upon a time", "a", "a"]
    output = rollout.generate(prompts, config)
    assert len(output.text) == len(output.tokens) == len(prompts)
    prompt_tokens = output.left_padded_prompt_tokens
    assert prompt_tokens.shape == (3, config.max_prompt_length)
    width = max(map(len, output.tokens))
    completions = np.array([[*each, *[0] * (width - len(each))] for each in output.tokens])
    found = np.asarray(rollout.get_per_token_logps(prompt_tokens, completions))
    for row, prompt, tokens, said in zip(found, prompt_tokens, output.tokens, output.logprobs):
        begin = int(np.argmax(prompt != 0))
        own = logps_of(actor, prompt[begin:].tolist(), tokens.tolist())
        np.testing.assert_allclose(row[: len(tokens)], own, atol=1e-4)
        np.testing.assert_allclose(said, own, atol=1e-4)
        assert not row[len(tokens) :].any()
    return [each.tolist() for each in output.tokens]


def main(folder: Path) -> None:
    actor = actor_of(folder)
    assert issubclass(JaxserveRollout, BaseRollout)
    make = functools.partial(
        JaxserveRollout, model=str(folder), dtype="float32", profile="none", max_seqs=4, pages=64
    )
    rollout = make(rollout_actor=actor, tokenizer=Padding(), mesh=None, rollout_config=None)
    first = assert_same(rollout, actor)
    assert first[1] != first[2]  # equal prompts are sampled each by itself
    assert rollout.model() is actor
    state = nnx.state(actor, nnx.Param)
    trained = jax.tree.map(lambda x: x + 0.3 * jnp.std(x) * jnp.sign(jnp.sin(9 * x)), state)
    nnx.update(actor, trained)
    with jax.transfer_guard_device_to_host("disallow_explicit"):  # as Tunix calls it
        rollout.update_params(trained, (nnx.Param,))
    assert rollout.llm.engine.weights.version == "2"
    assert assert_same(rollout, actor) != first
    rollout.close()
    print("the same")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
