"""Trains a small EAGLE-3 head (Li et al., 2025) for a dense Llama model with tied embeddings, and
writes it as a Hugging Face folder, so that proposed tokens can be measured with a real one.

    python -m experiments.benchmarks.eagle_head --minutes=30

Published heads are on hubs that benchmarks do not reach, and there is none for so small a model.
The model first answers prompts (`eagle_answers`). A dense forward gives its features and its own
distribution at each token. The head learns this distribution as it is used: several steps ahead,
each with the output of the step before (the paper's training-time test).

Answers to some prompts are held out. The head is tried on them every few minutes, and written each
time that it is better than before, whole or not at all: a folder is there early, and a head that
has begun to learn by heart is not kept.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors.numpy import save_file

from experiments.benchmarks.eagle_answers import (
    ANSWER,
    LONGEST,
    Answer,
    answers_of,
    frequent_ids,
    parted,
)
from experiments.benchmarks.eagle_layers import (
    Sizes,
    Weights,
    ahead,
    attend,
    mlp,
    norm,
    projected,
    read,
    stacked,
    window,
)
from experiments.benchmarks.model_files import hugging_face_tensors
from experiments.script import command_line
from jaxserve.checkpoint.model_config import to_hf
from jaxserve.cli.display import table
from jaxserve.folders import cache_folder
from jaxserve.settings.flags import Command
from jaxserve.settings.options import Option
from jaxserve.weights import CheckpointError, open_checkpoint
from jaxserve.weights.store import OrbaxFolder

OPTIONS = {
    "head": [
        Option("model", str, "smollm2-135m", "a fetched name, or a folder with a chat template"),
        Option("minutes", float, 30.0, "of training, after answers and features", 0.1),
        Option("out", str, None, "folder of the head; default: under the cache's side_by_side"),
        Option("answers", str, None, "file of the answers: read if it is there, else written"),
    ]
}
LENGTHS = (256, 448, LONGEST)  # of padded sequences, in tokens
SEQUENCES = 8  # of a batch
DRAFT_VOCAB = 8192
LEARNT = 3  # steps that the head is unrolled for to learn
TRIED = 4  # and to be tried
DECAY = 0.8  # weight of a step in the loss, over that of the step before
RATE = 1e-3  # highest learning rate
WARM_UP = 60  # updates until it is reached
TRIAL_SECONDS = 240.0
LINE_SECONDS = 10.0


class Batch(NamedTuple):
    """Padded sequences, and what the model makes of them. ids [sequences, length]. features
    [sequences, length, 3D]. rows [sequences, rows]: those that predict the tokens of the answer; of
    these, what the LM head gets (hidden), the likeliest next token (best), and 0 behind the end
    (inside)."""

    ids: Any
    rows: Any
    inside: Any
    features: Any
    hidden: Any
    best: Any


class Target(NamedTuple):
    """Parts of the model that a head is trained with. ids: the draft vocabulary. rows: of the LM
    head, those of these ids. among [vocabulary]: whether an id is one of them."""

    embedding: Any
    ids: Any
    rows: Any
    among: Any


def run(values: dict[str, Any]) -> int:
    name = f"{Path(values['model']).name}-eagle3"
    out = Path(values["out"] or cache_folder() / "side_by_side" / name)
    clock = Clock()
    answers = answers_of(values["model"], values["answers"])
    clock.tell(f"{sum(len(one.ids) - one.begins for one in answers)} tokens of answers")
    checkpoint = open_checkpoint(values["model"])
    assert not isinstance(checkpoint, OrbaxFolder)
    config = to_hf(checkpoint.config)
    sizes = Sizes.of(config)
    tensors = hugging_face_tensors(checkpoint, checkpoint.config)
    model = stacked(tensors, sizes)
    taught, held_out = parted(answers)
    batches = batches_of(taught, model, sizes, clock)
    trials = {kind: batches_of(some, model, sizes, clock) for kind, some in held_out.items()}
    embedding = tensors["model.embed_tokens.weight"]
    target = target_of(embedding, frequent_ids(taught, len(embedding), DRAFT_VOCAB))
    training = Training(first_head(tensors, target, sizes), target, sizes, clock)
    del model, tensors
    keep = functools.partial(write, target=target, config=config, out=out)
    training.run(batches, trials, values["minutes"] * 60, keep)
    return 0


class Clock:
    """Prints what is done, with the seconds since the beginning."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def tell(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  {text}", flush=True)


def target_of(embedding: np.ndarray, ids: np.ndarray) -> Target:
    among = np.zeros(len(embedding), bool)
    among[ids] = True
    return Target(*map(jnp.asarray, (embedding, ids, embedding[ids], among)))


def batches_of(
    answers: Sequence[Answer], model: Weights, sizes: Sizes, clock: Clock
) -> list[Batch]:
    """Makes batches of sequences of about the same length, with what the model makes of them."""
    batches = []
    for least, length in itertools.pairwise((0, *LENGTHS)):
        some = [each for each in answers if least < len(each.ids) <= length]
        for first in range(0, len(some), SEQUENCES):
            ids = np.zeros((SEQUENCES, length), np.int32)
            rows = np.zeros((SEQUENCES, ANSWER), np.int32)
            inside = np.zeros((SEQUENCES, ANSWER), bool)
            for place, each in enumerate(some[first : first + SEQUENCES]):
                ids[place, : len(each.ids)] = each.ids
                rows[place] = each.begins - 1 + np.arange(ANSWER)
                inside[place] = rows[place] < len(each.ids)
            rows = np.minimum(rows, length - 1)
            batch = Batch(ids, rows, inside, *read(model, ids, rows, sizes))
            batches.append(jax.block_until_ready(batch))
            clock.tell(f"read those up to {length} tokens: {first / len(some):.0%}")
    return batches


def first_head(tensors: Weights, target: Target, sizes: Sizes) -> Weights:
    """Returns a head that begins as the model's last layer on the last of the features; it makes
    little of the token's embedding yet."""
    last = f"model.layers.{sizes.layers - 1}."
    chance = np.random.default_rng(0)
    head = {"lm_head.weight": target.rows, "norm.weight": tensors["model.norm.weight"]}
    for name, tensor in tensors.items():
        part = name.removeprefix(last)
        if part.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensor = np.concatenate([chance.normal(0, 0.01, tensor.shape), tensor], 1)
        if part != name:
            head[f"midlayer.{part}"] = tensor
    size = target.embedding.shape[1]
    head["midlayer.hidden_norm.weight"] = head["midlayer.input_layernorm.weight"]
    head["midlayer.input_layernorm.weight"] = np.ones(size)
    head["fc.weight"] = np.eye(size, 3 * size, 2 * size)
    return {name: jnp.array(tensor, jnp.float32) for name, tensor in head.items()}


def unrolled(head: Weights, target: Target, batch: Batch, sizes: Sizes, steps: int) -> list[Any]:
    """Returns the logits [sequences, rows, draft vocabulary] of each step. Those of row t are of
    token t + 2 in step 0, and of one further in each step after it."""
    own = "midlayer."
    embedded = target.embedding[batch.ids]
    features = batch.features @ head["fc.weight"].T
    inner = _inner(head, ahead(embedded, 1), features, sizes)
    queries, keys, values = projected(inner, head, own, jnp.arange(batch.ids.shape[1]), sizes)
    kept = [(keys, values)]
    queries = window(queries, batch.rows)
    feature = window(features, batch.rows)
    embedded = window(embedded, batch.rows)
    logits = []
    for step in range(steps):
        if step > 0:
            inner = _inner(head, ahead(embedded, 1 + step), feature, sizes)
            queries, keys, values = projected(inner, head, own, batch.rows + step, sizes)
            kept.append((keys, values))
        mixed = attend(queries, batch.rows, kept)
        feature += mixed @ head["midlayer.self_attn.o_proj.weight"].T
        feature += mlp(feature, head, own, sizes)
        logits.append(norm(feature, head["norm.weight"], sizes) @ head["lm_head.weight"].T)
    return logits


def _inner(head: Weights, token: Any, feature: Any, sizes: Sizes) -> Any:
    """Returns what the attention of the head gets."""
    token = norm(token, head["midlayer.input_layernorm.weight"], sizes)
    feature = norm(feature, head["midlayer.hidden_norm.weight"], sizes)
    return jnp.concatenate([token, feature], -1)


def loss_of(head: Weights, target: Target, batch: Batch, sizes: Sizes) -> Any:
    """Returns the cross entropy against the model's own distribution over the draft vocabulary,
    where its likeliest token is in that."""
    wanted = jax.nn.softmax(batch.hidden @ target.rows.T)
    counts = (batch.inside & target.among[batch.best]).astype(jnp.float32)
    total = jnp.float32(0)
    for step, logits in enumerate(unrolled(head, target, batch, sizes, LEARNT)):
        errors = jax.nn.logsumexp(logits, -1) - (ahead(wanted, 1 + step) * logits).sum(-1)
        total += DECAY**step * (ahead(counts, 1 + step) * errors).sum()
    return total / counts.sum()


@functools.partial(jax.jit, static_argnames="sizes")
def counted(head: Weights, target: Target, batch: Batch, sizes: Sizes) -> Any:
    """Counts [steps, 2] the tokens of answers that are proposed where all before them were those of
    the answer, and those of them that are the model's likeliest."""
    ids = window(batch.ids, batch.rows)
    alive = batch.inside
    counts = []
    for step, logits in enumerate(unrolled(head, target, batch, sizes, TRIED)):
        proposed = target.ids[jnp.argmax(logits, -1)]
        asked = alive & ahead(batch.inside, 1 + step)
        right = asked & (proposed == ahead(batch.best, 1 + step))
        counts.append(jnp.stack([asked.sum(), right.sum()]))
        alive = right & (proposed == ahead(ids, 2 + step))
    return jnp.stack(counts)


class Training:
    """Trains a head against the clock. best: tokens in a row that the head of the best trial
    proposed rightly, on average."""

    def __init__(self, head: Weights, target: Target, sizes: Sizes, clock: Clock):
        self.head = head
        self.target = target
        self.sizes = sizes
        self.clock = clock
        self.best = 0.0
        self._optimiser = optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.95))
        self._state = self._optimiser.init(head)
        self._update = jax.jit(self._updated, donate_argnums=(0, 1))

    def run(
        self,
        batches: list[Batch],
        trials: dict[str, list[Batch]],
        seconds: float,
        keep: Callable[[Weights], None],
    ) -> None:
        """Trains for some seconds, over which the learning rate falls as a cosine. keep: is given
        each head that is better than those before."""
        began = tried = told = time.monotonic()
        chance = random.Random(0)
        share = 0.0
        order: list[Batch] = []
        for update in itertools.count(1):
            order = order or chance.sample(batches, len(batches))
            rate = RATE * min(1.0, update / WARM_UP) * (1 + np.cos(np.pi * share)) / 2
            self.head, self._state, loss = self._update(
                self.head, self._state, self.target, order.pop(), rate
            )
            loss.block_until_ready()
            now = time.monotonic()
            share = min(1.0, (now - began) / seconds)
            if now - told > LINE_SECONDS:
                epoch = update / len(batches)
                self.clock.tell(f"update {update}, epoch {epoch:.1f}, {share:.0%}: loss {loss:.3f}")
                told = now
            if now - tried > TRIAL_SECONDS or share == 1:
                tried = now
                if self._try(trials):
                    keep(self.head)
                    self.clock.tell("kept")
            if share == 1:
                return

    def _updated(
        self, head: Weights, state: Any, target: Target, batch: Batch, rate: Any
    ) -> tuple[Weights, Any, Any]:
        loss, gradient = jax.value_and_grad(loss_of)(head, target, batch, self.sizes)
        updates, state = self._optimiser.update(gradient, state)
        changes = jax.tree.map(lambda update: -rate * update, updates)
        return optax.apply_updates(head, changes), state, loss

    def _try(self, trials: dict[str, list[Batch]]) -> bool:
        """Prints how often each step is right on what was held out; returns whether this is the
        best head so far."""
        counts = {
            kind: np.sum([counted(self.head, self.target, one, self.sizes) for one in some], 0)
            for kind, some in trials.items()
        }
        counts["all"] = np.sum(list(counts.values()), 0)
        rows = []
        for kind, each in counts.items():
            shares = each[:, 1] / np.maximum(each[:, 0], 1)
            in_a_row = float(np.cumprod(shares).sum())
            rows.append([kind, *(f"{share:.3f}" for share in shares), f"{in_a_row:.2f}"])
        print(table(["held out", *(f"step {step}" for step in range(TRIED)), "in a row"], rows))
        before = self.best
        self.best = max(before, in_a_row)
        return in_a_row > before


def write(head: Weights, target: Target, config: dict[str, Any], out: Path) -> None:
    """Writes config.json and model.safetensors, the latter whole or not at all. config: that of the
    model."""
    out.mkdir(parents=True, exist_ok=True)
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": list(Sizes.of(config).captured),
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (out / "config.json").write_text(json.dumps(config | own, indent=1))
    ids = np.asarray(target.ids, np.int64)
    tensors = {name: np.asarray(tensor) for name, tensor in head.items()}
    tensors |= {"d2t": ids - np.arange(DRAFT_VOCAB), "t2d": np.asarray(target.among)}
    fresh = out / f".{os.getpid()}.safetensors"
    save_file(tensors, fresh, metadata={"format": "pt"})
    os.replace(fresh, out / "model.safetensors")


COMMAND = Command(OPTIONS, run, __doc__.partition("\n")[2])

if __name__ == "__main__":
    summary = "trains an EAGLE-3 head for the benchmark of drafts"
    sys.exit(command_line("eagle_head", summary, COMMAND, sys.argv[1:], CheckpointError))
