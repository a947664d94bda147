"""Builds the tokenizer that a GGUF file describes: its vocabulary, and by name the rule that splits
text before merging.

Two kinds exist among the models served here: byte-level BPE with merges ('gpt2': SmolLM, Llama 3,
Qwen) and SentencePiece BPE with scores ('llama': Llama 2, Mistral). Names that are not known here
are refused: a guess would silently give wrong tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.tokenizer_files import TokenizerFacts

# values of tokenizer.ggml.token_type
_CONTROL = 3
_USER_DEFINED = 4
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "\u2581"


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _smollm(tokenizer: Tokenizer) -> None:
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])


def _gpt2(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)


def _llama3(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = _split(_WORDS % "{1,3}")
    # a word that is a token is that token, whatever merges say
    tokenizer.model.ignore_merges = True


def _qwen2(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _split(_WORDS % "")


PRE: dict[str, Callable[[Tokenizer], None]] = {
    "smollm": _smollm,
    "gpt-2": _gpt2,
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "qwen2": _qwen2,
}
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3")


def from_fields(fields: Mapping[str, Any]) -> Tokenizer:
    """Builds a tokenizer from GGUF metadata. Errors: CheckpointError where the metadata is
    incomplete or of an unknown kind."""
    kind = fields.get("tokenizer.ggml.model")
    tokens = fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(t, str) for t in tokens):
        raise CheckpointError("tokenizer.ggml.tokens: is missing or holds no texts")
    if len(set(tokens)) != len(tokens):
        raise CheckpointError("tokenizer.ggml.tokens: some tokens are given more than once")
    if kind not in _KINDS:
        raise CheckpointError(f"tokenizer.ggml.model: {kind!r} is not one of {', '.join(_KINDS)}")
    tokenizer = _KINDS[kind](fields, tokens)
    types = fields.get("tokenizer.ggml.token_type", ())
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False)
            for t, k in zip(tokens, types)
            if k == _CONTROL
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(t, special=False, normalized=False)
            for t, k in zip(tokens, types)
            if k == _USER_DEFINED
        ]
    )
    _add_ends(tokenizer, fields, tokens)
    return tokenizer


def _byte_level(fields: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    pre = fields.get("tokenizer.ggml.pre")
    merges = fields.get("tokenizer.ggml.merges")
    if pre not in PRE:
        raise CheckpointError(
            f"tokenizer.ggml.pre: {pre!r} is not one of {', '.join(PRE)}; a folder with "
            "tokenizer.json would serve"
        )
    if not isinstance(merges, list):
        raise CheckpointError("tokenizer.ggml.merges: is missing")
    known = set(tokens)
    pairs = []
    for merge in merges:
        left, _, right = str(merge).partition(" ")
        if not known.issuperset((left, right, left + right)):
            raise CheckpointError(
                f"tokenizer.ggml.merges: {merge!r} does not merge two tokens into a third"
            )
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, pairs))
    PRE[pre](tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(fields: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    scores = fields.get("tokenizer.ggml.scores")
    unknown = fields.get("tokenizer.ggml.unknown_token_id", 0)
    if scores is None or len(scores) != len(tokens) or not 0 <= unknown < len(tokens):
        raise CheckpointError(
            "tokenizer.ggml.scores: there must be one for each token, and the unknown token must "
            "be one of them"
        )
    vocabulary = {t: i for i, t in enumerate(tokens)}
    merges = _merges(vocabulary, scores)
    has_bytes = "<0x00>" in vocabulary
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=has_bytes
        )
    )
    prefix = fields.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    undone = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *undone]
    )
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Any) -> list[tuple[str, str]]:
    """Returns the merges that equal SentencePiece's rule, which merges the neighbours whose union
    scores highest: all ways to make each token, tokens by falling score."""
    ways = []
    for token, i in vocabulary.items():
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        ways += [
            (-float(scores[i]), i, vocabulary[a], vocabulary[b], a, b)
            for a, b in halves
            if a in vocabulary and b in vocabulary
        ]
    return [(a, b) for *_, a, b in sorted(ways)]


def _add_ends(tokenizer: Tokenizer, fields: Mapping[str, Any], tokens: list[str]) -> None:
    """Adds the first and last token that the model wants around a text."""
    default = (
        fields["tokenizer.ggml.model"] == "llama"
        or fields.get("tokenizer.ggml.pre") in _BOS_BY_DEFAULT
    )
    names = TokenizerFacts.of_gguf(fields).specials
    begin = end = None
    if fields.get("tokenizer.ggml.add_bos_token", default):
        begin = names.get("bos_token")
    if fields.get("tokenizer.ggml.add_eos_token", False):
        end = names.get("eos_token")
    if begin or end:
        ids = [(t, tokens.index(t)) for t in dict.fromkeys((begin, end)) if t]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join(filter(None, (begin, "$A", end))), special_tokens=ids
        )


_KINDS = {"gpt2": _byte_level, "llama": _sentencepiece}
