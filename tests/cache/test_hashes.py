from __future__ import annotations

import numpy as np

from jaxserve.cache.hashes import BlockHashes, CacheIdentity, block_key, root_key


def chain(tokens, root=b"root", size=4):
    return BlockHashes(root, size, lambda first, last: np.asarray(tokens, np.int32)[first:last])


def test_equal_keys_mean_equal_prefixes():
    one = chain([1, 2, 3, 4, 5, 6, 7, 8])
    two = chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[0] != two[0] and one[1] != two[1]  # the same second block after another first one
    assert one[1] == chain([1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 0])[1]
    assert one[1] == block_key(block_key(b"root", np.arange(1, 5)), np.arange(5, 9))


def test_model_dtype_layout_block_size_and_salt_each_change_the_root():
    asked = [
        (CacheIdentity("m", "f"), 16, ""),
        (CacheIdentity("n", "f"), 16, ""),
        (CacheIdentity("m", "g"), 16, ""),
        (CacheIdentity("m", "f", "l"), 16, ""),
        (CacheIdentity("m", "f"), 8, ""),
        (CacheIdentity("m", "f"), 16, "s"),
        (CacheIdentity("m', 'f"), 16, ""),
    ]
    assert len({root_key(*one) for one in asked}) == len(asked)


def test_a_key_is_computed_once_and_only_when_asked_for():
    asked = []
    keys = BlockHashes(
        b"r", 2, lambda first, last: asked.append(first) or np.arange(first, last, dtype=np.int32)
    )
    assert keys[1] == keys[1] and asked == [0, 2]
    other = BlockHashes(
        b"r", 2, lambda first, last: asked.append("other") or np.arange(first, last, dtype=np.int32)
    )
    other.copy_from(keys, 2)
    assert other[1] == keys[1] and asked == [0, 2]
