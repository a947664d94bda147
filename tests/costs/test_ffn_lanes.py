"""Compares predicted messages of lanes that share out experts or MLPs with a compiled layer's, and
with sums by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from experiments.multihost.hlo import collectives
from jaxserve.checkpoint.specs import ExpertsSpec, MlpSpec
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.costs.ffn_lanes import ffn_traffic
from jaxserve.costs.profiles import devices
from jaxserve.lab.simulate.run import System
from jaxserve.models.experts import Experts
from jaxserve.models.mlp import GatedMlp
from jaxserve.models.tokens import Tokens
from jaxserve.settings.schema import MeshConfig
from jaxserve.sharding import rules
from jaxserve.sharding.mesh import KVP, TP

TINY = MODELS["tiny"]
QWEN = MODELS["qwen3-30b-a3b"]
TOKENS = 6  # of a lane


@pytest.mark.skipif(jax.device_count() < 8, reason="needs 8 devices")
@pytest.mark.parametrize("lanes, tp", [(2, 4), (4, 2), (8, 1), (1, 8)])
@pytest.mark.parametrize("kind", ["experts", "experts and what is shared", "MLP"])
def test_a_compiled_layer_sends_what_the_formula_says(lanes, tp, kind):
    spec: ExpertsSpec | MlpSpec = ExpertsSpec(16, 3, 32, lanes=lanes)
    if kind == "MLP":
        spec = MlpSpec(lanes=lanes)
    elif kind != "experts":
        spec = ExpertsSpec(16, 3, 32, shared=64, lanes=lanes, shared_lanes=lanes)
    model = dataclasses.replace(TINY, mlps=(spec,))
    made = GatedMlp if kind == "MLP" else Experts
    graph, state = nnx.split(made(model, 0))
    split = {name: rules.spec(*one.axes) for name, one in spec.declare(model).items()}
    tokens = PartitionSpec(KVP)
    layer = jax.shard_map(
        lambda state, x, positions: nnx.merge(graph, state)(x, Tokens(positions)),
        mesh=Mesh(np.array(jax.devices()[:8]).reshape(lanes, tp), (KVP, TP)),
        in_specs=(type(state)(split), tokens, tokens),
        out_specs=PartitionSpec((KVP, TP)),
        check_vma=False,
    )
    x = jnp.ones((lanes * TOKENS, TINY.d_model))
    text = jax.jit(layer).lower(state, x, jnp.arange(len(x))).compile().as_text()
    found = collectives(text, 8)  # with the bytes of results
    bytes_of = lambda name: sum(one.times * one.bytes for one in found if one.operation == name)
    sent = {
        "all-gather": bytes_of("all-gather") * (lanes - 1) // lanes,
        "reduce-scatter": bytes_of("reduce-scatter") * (lanes - 1),
    }
    said = ffn_traffic(TINY.d_model, spec, item=4)
    # of what is not experts, positions are gathered too: of a whole model once, for all layers
    positions = 4 * (lanes - 1) * (kind != "experts")
    assert sent == {
        "all-gather": TOKENS * (said.gathered + positions),
        "reduce-scatter": TOKENS * said.scattered,
    }
    assert {one.operation for one in found} <= sent.keys()
    messages = said.messages + (lanes > 1 and kind != "experts")
    assert sum(one.times for one in found) <= messages  # XLA may join some


def test_seconds_of_experts_over_lanes_by_hand():
    """Qwen3-30B-A3B: each of four lanes gets three tokens of 2,048 numbers in bf16, with weights
    and numbers of 8 experts, and sends as many sums, over the links of a node."""
    mesh = MeshConfig(kvp=4, tp=2)
    apart = System(QWEN, "h100", mesh, expert_parallel=True)
    link = apart.link(4)
    costs = apart.costs
    assert costs.experts_sent == pytest.approx(4 * link.seconds)
    token = 3 * (2048 * 2 + 8 * 8) + 3 * 2048 * 2
    assert costs.experts_sent_token == pytest.approx(token / link.bytes_per_s)
    across = System(QWEN, "h100", MeshConfig(kvp=16), expert_parallel=True).costs
    assert across.experts_sent == pytest.approx(4 * devices()["h100"].node.seconds)
    assert System(QWEN, "h100", mesh).costs.experts_sent == 0


def test_lanes_that_share_experts_hold_and_read_fewer_of_them():
    """A rank of two lanes holds half of the experts, which tokens of both lanes use: of few tokens
    it reads half as many, of many it computes as much."""
    alone, shared = (
        System(QWEN, "h100", MeshConfig(kvp=2, tp=2), expert_parallel=each)
        for each in (False, True)
    )
    experts = 48 * 128 * 3 * 2048 * 768 * 2  # bytes
    assert alone.weights - shared.weights == experts / 4
    assert shared.kv_tokens() > alone.kv_tokens()
    few, of_all = shared.costs, alone.costs
    assert few.expert_floor == of_all.expert_floor / 2
    assert few.expert_lanes == 2
    used = 1 - (1 - 8 / 128) ** 8  # by four tokens of each lane
    messages = few.tp + few.tp_token * 4 + few.experts_sent + few.experts_sent_token * 4
    read = few.linear_floor + used * few.expert_floor
    assert few.linear(4) - messages == pytest.approx(read, rel=0.05)
    # products as before; but tokens of both lanes are sorted by expert, and their results summed
    sorted_bytes = 2 * 8 * (3 * 768 + 2 * 2048) / devices()["h100"].elementwise_bytes_per_s
    assert few.linear_token == pytest.approx(of_all.linear_token + sorted_bytes)


def test_lanes_that_share_mlps_read_their_part_and_compute_as_much():
    llama = MODELS["llama3.1-8b"]
    mesh = MeshConfig(kvp=4, tp=2)
    alone, shared = (System(llama, "h100", mesh, ffn_over_lanes=each) for each in (False, True))
    mlps = 32 * 3 * 4096 * 14336 * 2  # bytes
    assert alone.weights - shared.weights == mlps / 2 - mlps / 8
    few, of_all = shared.costs, alone.costs
    assert 0.3 < few.linear_floor / of_all.linear_floor < 0.6
    # the products of a token are as many; it is gathered, and its result scattered
    assert of_all.linear_token < few.linear_token < 1.1 * of_all.linear_token
    link = shared.link(4)
    assert few.experts_sent == pytest.approx(2 * link.seconds)
    assert few.experts_sent_token == pytest.approx(2 * 3 * 4096 * 2 / link.bytes_per_s)


def test_experts_must_divide_over_the_devices_that_share_them():
    system = System(QWEN, "h100", MeshConfig(kvp=3), expert_parallel=True)
    assert system.obstacle() == "1 ranks of each lane do not split the MLP or 128 experts"
