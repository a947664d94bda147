"""Outputs continue the text of their prompts, whatever is cut where, and tokens have places in it:
of a byte-level vocabulary and of one as SentencePiece makes them."""

import functools

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.text import Tokenizer
from jaxserve.text.detokenizer import byte_alphabet
from tests.examples import examples

SPACE = "\u2581"
SPECIALS = ("<unk>", "<s>", "</s>")
BLANK_FIRST = [
    decoders.Replace(SPACE, " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
]


def specials_of(library):
    library.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIALS])
    pairs = [("<s>", library.token_to_id("<s>"))]
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=pairs)
    return Tokenizer(library, {"bos_token": "<s>", "eos_token": "</s>"})


def sentencepiece(decoder):
    tokens = [*SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [(SPACE, "a"), (SPACE + "a", "b"), ("a", "b"), (SPACE, SPACE), ("b", SPACE)]
    tokens += [SPACE, *"abc.", *("".join(pair) for pair in merges)]
    vocabulary = {token: id for id, token in enumerate(dict.fromkeys(tokens))}
    library = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]
    )
    library.decoder = decoder
    return specials_of(library)


def byte_level():
    alphabet = byte_alphabet()
    space = alphabet[ord(" ")]
    merges = [(space, "a"), ("a", "b"), (alphabet[0xC3], alphabet[0xA9])]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    library = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    return specials_of(library)


@functools.cache
def made(kind):
    if kind == "bytes":
        return byte_level()
    if kind == "metaspace":
        return sentencepiece(decoders.Metaspace(SPACE, "always"))
    return sentencepiece(decoders.Sequence(BLANK_FIRST))


KINDS = pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "metaspace"])
TEXTS = st.text("ab c.é你🚀", max_size=12)


@KINDS
@settings(max_examples=examples(150), deadline=None)
@given(text=TEXTS, cut=st.integers(0, 40), step=st.integers(1, 4))
def test_prompt_and_streamed_output_are_the_text(kind, text, cut, step):
    tokenizer = made(kind)
    ids = tokenizer.encode(text)
    cut = min(cut, len(ids))
    prompt, output = ids[:cut], ids[cut:]
    stream = tokenizer.stream(prompt=prompt)
    parts = [stream.push(*output[at : at + step]) for at in range(0, len(output), step)]
    written = "".join(parts) + stream.flush()
    whole = tokenizer.decode(ids)
    assert whole == text
    before = tokenizer.decode(prompt)
    if "\ufffd" not in before:  # the prompt ends between characters
        assert before + written == text and not any("\ufffd" in part for part in parts)
    assert stream.length == len(written)


@KINDS
@settings(max_examples=examples(150), deadline=None)
@given(text=TEXTS, special=st.booleans())
def test_a_token_begins_where_the_text_before_it_ends(kind, text, special):
    tokenizer = made(kind)
    if special and kind == "bytes":  # others' decoders put a blank behind it
        text = f"a</s>{text}"
    ids = tokenizer.encode(text)
    positions = tokenizer.positions(text, ids)
    names = [tokenizer.piece(id).decode(errors="replace") for id in ids]
    assert positions[:1] == [0] and positions == sorted(positions)
    for name, begin in zip(names[1:], positions[1:]):
        if "\ufffd" not in name:
            stripped = name.removeprefix(" ") if begin == 0 and kind != "bytes" else name
            assert text.startswith((name, stripped), begin)
        else:
            assert not text[begin].isascii()


def test_bytes_of_a_character_that_never_ends_have_places_too():
    tokenizer = made("bytes")
    rocket = tokenizer.encode("🚀", special=False)
    a, b = tokenizer.encode("a", special=False) + tokenizer.encode("b", special=False)
    ids = [*rocket[:2], a, rocket[0], *rocket, b, rocket[2], b]
    text = tokenizer.decode(ids)
    assert text == "\ufffda\ufffd🚀b\ufffdb"
    assert tokenizer.stream().positions(*ids) == [0, 0, 1, 2, 3, 3, 3, 3, 4, 5, 6]


def test_only_an_output_after_nothing_loses_the_blank_before_its_first_word():
    tokenizer = made("sentencepiece")
    word = tokenizer.encode("ab")[1:]
    bos, eos = 1, 2
    for prompt, text in (((), "ab"), ((bos,), "ab"), ((bos, *word), " ab"), ((bos, eos), "ab")):
        assert tokenizer.stream(prompt=prompt).push(*word) == text
    assert tokenizer.stream(skip_special=False, prompt=[bos]).push(*word) == " ab"
