"""Who may join a group."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.group.messages import Hello, difference, led_by, shared_settings
from jaxserve.settings.options import make, values_of
from jaxserve.settings.schema import EngineConfig
from tests.examples import examples

BASE = dict(mesh="spp=2,kvp=2,tp=3", profile="p.json", pages=100)


def hello(worker=0, versions=None, weights="f" * 64, **changes):
    """Makes the greeting of a member with these settings, as the other side reads it."""
    config = make(EngineConfig, {**BASE, **changes})
    versions = versions or {"jaxserve": "1.0", "jax": "0.10.2"}
    made = Hello(worker, versions, shared_settings(config), weights, 4000 + worker)
    return Hello.decode(made.encode())


def test_a_worker_with_the_same_of_all_may_join():
    assert difference(hello(-1), hello(3)) is None


@pytest.mark.parametrize(
    "name, ours, theirs",
    [
        ("mesh", "spp=2,kvp=2,tp=3", "spp=1,kvp=4,tp=3"),
        ("dtype", "auto", "bfloat16"),
        ("kv_cache_dtype", "auto", "fp8"),
    ],
)
def test_a_setting_that_differs_is_named_with_both_values(name, ours, theirs):
    refused = difference(hello(-1), hello(**{name: theirs}))
    assert refused == f"setting {name} is {theirs!r}, and {ours!r} at the leader"


def test_in_all_other_settings_a_worker_follows_the_leader():
    """The places of the model and of compiled programs on its machine stay its own."""
    leader = make(EngineConfig, {**BASE, "model": "/a", "max_seqs": 17, "block_size": 32})
    told = json.loads(json.dumps(values_of(leader)))
    own = make(EngineConfig, {"model": "/b", "compile_cache": "/c", "chunk_tokens": 96})
    found = led_by(told, own)
    assert (found.source.model, found.compile_cache) == ("/b", "/c")
    there = values_of(leader) | {"model": "/b", "compile_cache": "/c"}
    assert values_of(found) == there and make(EngineConfig, values_of(leader)) == leader


@pytest.mark.parametrize("what", ["jax", "jaxserve"])
def test_another_version_is_named(what):
    versions = {"jaxserve": "1.0", "jax": "0.10.2", what: "9.9"}
    refused = difference(hello(-1), hello(versions=versions))
    assert refused is not None and refused.startswith(f"version of {what} is '9.9', and '")


def test_a_version_that_only_one_side_knows_is_a_difference():
    versions = {"jaxserve": "1.0", "jax": "0.10.2", "cuda": "13"}
    assert difference(hello(-1), hello(versions=versions)) == (
        "version of cuda is '13', and None at the leader"
    )
    assert "cuda is None" in str(difference(hello(-1, versions=versions), hello()))


def test_other_weights_are_told_by_their_fingerprints():
    refused = difference(hello(-1), hello(weights="a" * 64))
    assert refused == (
        "its weights are other ones (fingerprint aaaaaaaaaaaa, and ffffffffffff at the leader)"
    )


GOOD = json.loads(hello().encode())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"{",
        b"null",
        b"[]",
        b"3",
        b"{}",
        b"[" * 60_000,
        *(
            json.dumps(said).encode()
            for said in [
                {**GOOD, "more": 1},
                {name: value for name, value in GOOD.items() if name != "port"},
                {**GOOD, "worker": "0"},
                {**GOOD, "worker": True},
                {**GOOD, "worker": 0.5},
                {**GOOD, "worker": None},
                {**GOOD, "port": "22"},
                {**GOOD, "versions": []},
                {**GOOD, "versions": None},
                {**GOOD, "settings": "all"},
                {**GOOD, "weights": 5},
            ]
        ),
    ],
)
def test_what_is_no_hello_is_a_value_error(content):
    with pytest.raises(ValueError):
        Hello.decode(content)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(sorted(GOOD)), plain)
def test_any_hello_is_read_and_compared_or_is_a_value_error(name, value):
    try:
        read = Hello.decode(json.dumps({**GOOD, name: value}).encode())
    except ValueError:
        return
    refused = difference(hello(-1), read)
    assert refused is None or isinstance(refused, str)
