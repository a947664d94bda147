"""What one tenant asked shortens nothing for another: no prefix is shared between salts, and
latencies do not tell what others asked."""

import hashlib

import numpy as np
import pytest

from jaxserve.api.events import Finished
from jaxserve.api.sampling import SamplingParams
from jaxserve.llm import open_engine
from jaxserve.server.client import Client
from jaxserve.server.supervisor import Background
from jaxserve.settings.options import make
from jaxserve.settings.schema import EngineConfig, ServerConfig

SETTINGS = {
    "model": "random:tiny",
    "max_model_len": 256,
    "chunk_tokens": 16,
    "max_seqs": 4,
    "pages": 400,
    "profile": "none",
}
ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
PAIRS = 200


@pytest.fixture(scope="module")
def tenants(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys.yaml"
    lines = [
        f"- {{name: {name}, sha256: {hashlib.sha256(name.encode()).hexdigest()}}}"
        for name in ("alice", "bob")
    ]
    file.write_text("\n".join(["keys:", *lines]))
    file.chmod(0o600)
    config = make(EngineConfig, SETTINGS)
    with Background(
        ServerConfig(grpc_port=0, port=0, api_keys=str(file)),
        lambda: open_engine(config, False, False),
    ) as server:
        server.wait_ready()
        with (
            Client(server.target, api_key="alice") as alice,
            Client(server.target, api_key="bob") as bob,
        ):
            yield alice, bob


def ask(client, prompt):
    """(seconds to the first token, cached tokens)"""
    *_, end = (output for output in client.generate(prompt, ONE) if isinstance(output, Finished))
    return end.timing.first_token, end.usage.cached


def separable(first, second):
    """The chance that one of the first is shorter than one of the second: 0.5 where nothing tells
    them apart."""
    return float(np.mean(np.asarray(first)[:, None] < np.asarray(second)[None]))


def test_a_tenant_finds_its_own_prefixes_and_nobody_elses(tenants):
    alice, bob = tenants
    prompt = list(range(3, 195))
    assert ask(alice, prompt)[1] == 0 and ask(alice, prompt)[1] > 150
    assert ask(bob, prompt)[1] == 0 and ask(bob, prompt)[1] > 150


@pytest.mark.matrix
@pytest.mark.parametrize("tokens", [96, 192])
def test_latencies_do_not_tell_what_another_tenant_asked(tenants, tokens):
    """tokens: of each prompt."""
    alice, bob = tenants
    dice = np.random.default_rng(0)
    known = []
    unknown = []
    own = []
    for number in range(PAIRS):
        asked, fresh = (dice.integers(3, 512, tokens).tolist() for _ in range(2))
        ask(alice, asked)
        for prompt, found in (
            ((asked, known), (fresh, unknown)) if number % 2 else ((fresh, unknown), (asked, known))
        ):
            found.append(ask(bob, prompt)[0])
        own.append(ask(alice, asked)[0])
    assert 0.4 < separable(known, unknown) < 0.6
    assert separable(own, unknown) > 0.9  # which is what there would be to see
