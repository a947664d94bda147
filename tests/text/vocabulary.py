"""A small tokenizer, as a GGUF file describes one, for models of random weights: every byte, and
some words of JSON."""

from __future__ import annotations

import functools

from jaxserve.checkpoint.tokenizer_files import TokenizerFacts
from jaxserve.text import Tokenizer
from jaxserve.text.vocabulary import from_fields

EOS = 2
WORDS = [
    '{"',
    '":',
    '",',
    '"}',
    "tr",
    "true",
    "fal",
    "false",
    "nu",
    "null",
    "12",
    "00",
    "Ġ{",
    "Ġ[",
    'Ġ"',
    "}}",
    "]]",
    "ab",
    "abc",
    "cd",
    "ĊĊ",
    "ue",
    "se",
    "ll",
    "al",
]
MERGES = [
    '{ "',
    '" :',
    '" ,',
    '" }',
    "t r",
    "tr ue",
    "f al",
    "fal se",
    "n u",
    "nu ll",
    "1 2",
    "0 0",
    "Ġ {",
    "Ġ [",
    'Ġ "',
    "} }",
    "] ]",
    "a b",
    "ab c",
    "c d",
    "Ċ Ċ",
    "u e",
    "s e",
    "l l",
    "a l",
]


def alphabet() -> list[str]:
    """Returns what byte-level vocabularies write for each byte."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


@functools.cache
def tokenizer(specials: tuple[str, ...] = (), template: str = "") -> Tokenizer:
    """Returns the tokenizer, with more special tokens and a chat template."""
    tokens = ["<unk>", "<s>", "</s>", *alphabet(), *WORDS]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*tokens, *specials],
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * (len(tokens) - 3), *[3] * len(specials)],
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    if template:
        fields["tokenizer.chat_template"] = template
    facts = TokenizerFacts.of_gguf(fields)
    return Tokenizer(from_fields(fields), facts.specials, facts.templates or {})
