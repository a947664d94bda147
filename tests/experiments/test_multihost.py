"""What the collectives of a step are, and which of them cross hosts, from lowered programs of a
tiny model; and from compiled ones, where `python -m experiments.gpu_targets.compiler` was run."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from experiments.gpu_targets import compiler
from experiments.multihost import collectives
from experiments.multihost.hlo import Collective
from experiments.multihost.hlo import collectives as read
from jaxserve.settings.schema import ConfigError, MeshConfig

TINY = dict(model="tiny", max_seqs=4, chunk_tokens=64, min_chunk=16, max_model_len=1024)


def replica(mesh: str, hosts: int, **others) -> collectives.Replica:
    return collectives.Replica(mesh=MeshConfig.parse(mesh), hosts=hosts, **{**TINY, **others})


def crossing(programs: list[collectives.Program]) -> Counter:
    """Steps and what crosses hosts in them, with how often."""
    out: Counter = Counter()
    for one in programs:
        out[one.step, one.operation, one.axis] += one.times * one.crosses
    return +out


def test_with_a_stage_on_each_host_only_what_passes_between_stages_crosses():
    source, programs = collectives.measured(
        replica("spp=2,tp=2", 2, only="decode,sampling greedy"), lowered=True
    )
    assert source == collectives.LOWERED
    assert {operation for _, operation, _ in crossing(programs)} == {
        "activations",
        "sampled tokens",
    }
    ranks = [one for one in programs if one.axis == "ranks" and one.step == "decode"]
    # two sums in each of two layers, and that of the embedding: 4 tokens of 64 numbers of 16 bits
    assert sum(one.times for one in ranks) == 5 and {one.bytes for one in ranks} == {4 * 64 * 2}
    activations = next(one for one in programs if one.operation == "activations")
    assert activations.bytes == 4 * 64 * 2 and activations.across == {1: 2 * 4 * 64 * 2}


def test_with_a_lane_on_each_host_exchanges_cross_and_ranks_do_not():
    steps = "decode,sampling greedy,spread prefill gather"
    rings = "spread prefill pass_q,spread prefill pass_kv"
    _, programs = collectives.measured(
        replica("kvp=2,tp=2", 2, only=f"{steps},{rings}"), lowered=True
    )
    found = crossing(programs)
    assert found["spread prefill gather", "all-to-all", "lanes"] == 2  # one in each layer
    assert found["spread prefill pass_q", "collective-permute", "lanes"] == 2
    assert found["sampling greedy", "all-gather", "lanes"] == 1
    assert not any(axis == "ranks" for _, _, axis in found)
    loops = [one for one in programs if one.per_chunk]
    assert {one.step for one in loops} == {"spread prefill pass_kv"}
    # keys and values of 2048 tokens, of the one head of 16 that a rank has
    assert max(one.bytes for one in loops) == 2048 * 2 * 16 * 2
    assert not any(step == "decode" for step, _, _ in found)


def test_ranks_on_several_hosts_are_refused():
    with pytest.raises(ConfigError, match="ranks_across_hosts"):
        collectives.measured(replica("tp=4", 2), lowered=True)


def test_the_command_prints_a_table_and_writes_every_figure(tmp_path, capsys):
    file = tmp_path / "figures.json"
    flags = [f"--{name}={value}" for name, value in {**TINY, "only": "decode"}.items()]
    assert (
        collectives.main(["--lowered", "--mesh=spp=2", "--hosts=2", f"--json={file}", *flags]) == 0
    )
    assert "from lowered programs" in capsys.readouterr().out
    figures = json.loads(file.read_text())
    assert figures["source"] == collectives.LOWERED and figures["programs"]


@pytest.mark.skipif(compiler.lacking() is not None, reason=str(compiler.lacking()))
def test_compiled_programs_send_as_much_between_lanes_as_lowered_ones():
    asked = replica("kvp=2", 2, only="spread decode", whole=True)
    both = [collectives.measured(asked, lowered=lowered)[1] for lowered in (True, False)]
    sums = [
        sum(one.times * sum(one.across.values()) for one in programs if one.step == "spread decode")
        for programs in both
    ]
    assert sums[0] == sums[1] > 0


HLO = """HloModule m

%body (p: s32[]) -> s32[] {
  %r = bf16[4,8]{1,0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
}

%layer (p: s32[]) -> s32[] {
  %s = ((f32[2,3]{1,0}), f32[4,3]{1,0}) all-gather-start(%y), replica_groups=[2,2]<=[2,2]T(1,0)
  %w = (s32[]) while(%t), condition=%c, body=%body
}

ENTRY %main (p: s32[]) -> s32[] {
  %a = f32[5]{0} all-reduce(%z), replica_groups={{0,1},{2,3}}, to_apply=%add
  %b = f32[5]{0} all-reduce(%z), replica_groups=mesh['kvp'=2,'tp'=2] {'tp'}, to_apply=%add
  %c1 = s32[] call(%a), to_apply=%layer
  %c2 = s32[] call(%b), to_apply=%layer
}
"""


def test_collectives_are_counted_through_calls_and_loops():
    pairs = ((0, 1), (2, 3))
    assert read(HLO, 4) == [
        Collective("all-reduce", 20, pairs, 2),
        Collective("all-gather", 48, ((0, 2), (1, 3)), 2),
        Collective("collective-permute", 64, ((0, 1), (1, 0)), 2, looped=True),
    ]


def test_bytes_that_leave_a_host():
    hosts = [0, 0, 1, 1]
    everywhere = ((0, 1, 2, 3),)
    assert Collective("all-reduce", 400, everywhere).sent(hosts)[0, 1] == 2 * 400 * 3 / 4
    assert Collective("all-gather", 400, everywhere).sent(hosts)[0, 1] == 400 * 3 / 4
    assert Collective("all-to-all", 400, everywhere).sent(hosts)[0, 1] == 4 * 100
    assert Collective("collective-permute", 400, ((0, 2), (2, 0))).sent(hosts)[0, 1] == 400
