"""Blocks of KV go out of a replica and into another one as files, and only what fits is taken."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.api.errors import RequestError
from jaxserve.store.kv_file import KvFile, read_kv_file
from tests.engine.harness import Runner, engine, generate
from tests.examples import examples
from tests.replica.pools import FilesOf

PROMPT = np.arange(3, 20, dtype=np.int32)  # four full blocks of four tokens, and a part


def refused(work, field: str, said: str) -> None:
    with pytest.raises(RequestError, match=said) as refusal:
        work()
    assert refusal.value.field == field


def test_a_file_has_what_goes_into_it_and_the_next_one_goes_on():
    made = FilesOf()
    blocks = made.fill(PROMPT, 4)
    first = made.pool.get(PROMPT, "", 0, 100)
    second = made.pool.get(PROMPT, "", 3, 100)
    assert (first.first, len(first.blocks), second.first, len(second.blocks)) == (0, 3, 3, 1)
    assert (np.concatenate([first.blocks, second.blocks]) == blocks).all()
    refused(lambda: made.pool.get(PROMPT, "", 4, 100), "prompt", "no block 4")
    refused(lambda: made.pool.get(PROMPT, "a salt", 0, 100), "prompt", "no block 0")


def test_a_file_is_read_as_it_was_written_and_taken_once():
    one, other = FilesOf(), FilesOf()
    one.fill(PROMPT, 4)
    file = read_kv_file(one.pool.get(PROMPT, "", 1, 1000).content())
    assert file.first == 1 and len(file.blocks) == 3
    assert (other.pool.put(file, ""), other.pool.put(file, "")) == (3, 0)
    other.fill(PROMPT, 1)
    assert other.pool.find(PROMPT, "")[0].below == 4


def test_blocks_of_another_model_size_or_content_are_refused():
    one = FilesOf()
    one.fill(PROMPT, 2)
    file = one.pool.get(PROMPT, "", 0, 1000)
    refused(lambda: FilesOf("others").pool.put(file, ""), "file", "fingerprint")
    refused(lambda: FilesOf(size=64).pool.put(file, ""), "file", "64")
    blocks = file.blocks.copy()
    blocks[1, 5] ^= 1
    other = FilesOf()
    damaged = dataclasses.replace(file, blocks=blocks)
    refused(lambda: other.pool.put(damaged, ""), "file", "checksum of block 1")
    tokens = file.tokens.copy()
    tokens[0] += 1
    other_prompt = dataclasses.replace(file, tokens=tokens)
    refused(lambda: other.pool.put(other_prompt, ""), "file", "checksum of block 0")
    assert not other.tiers.host.keys()
    refused(lambda: dataclasses.replace(file, tokens=tokens[:7]), "file", "7 tokens")


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=200), st.integers(0, 600))
def test_any_bytes_are_read_or_refused(noise, at):
    made = FilesOf()
    made.fill(PROMPT, 2)
    content = made.pool.get(PROMPT, "", 0, 1000).content()
    for changed in (noise, content[:at], content[:at] + noise + content[at + len(noise) :]):
        try:
            assert isinstance(read_kv_file(changed), KvFile)
        except RequestError as error:
            assert error.field == "file"


def test_an_engine_goes_on_with_the_blocks_of_another_one():
    small = dict(mesh="", chunk=32, seqs=2, pages=40, max_len=256, host_cache_gib=0.02)
    prompt = [7 * number % 199 + 1 for number in range(100)]
    one = engine(**small)
    expected = generate(one, [prompt], max_tokens=6)[0]
    one.start()
    file = one.kv_pool.get(np.array(prompt, np.int32), "", 0, 1 << 30)
    one.close()
    other = engine(**small)
    assert len(file.blocks) == 6 == other.kv_pool.put(read_kv_file(file.content()), "")
    runner = Runner(other)
    id = runner.submit(prompt, max_tokens=6)
    runner.run()
    assert runner.ids(id) == expected
    assert runner.completion(id).finished.usage.cached == 96
    other.close()
