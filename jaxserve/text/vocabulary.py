"""Builds the tokenizer that a GGUF file describes: its vocabulary, and by name the rule that splits
text before merging.

Two kinds exist among the models served here: byte-level BPE with merges ('gpt2': SmolLM, Llama 3,
Qwen, gpt-oss, ...) and SentencePiece BPE with scores ('llama': Llama 2, Mistral, Gemma). Names that
are not known here are refused: a guess would silently give wrong tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
_SPACE = "\u2581"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = _SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_END = _SIGNS + r"[\r\n]*" + _BLANKS
_END_WITH_SLASH = _SIGNS + r"[\r\n/]*" + _BLANKS


def _cased(suffix: str, but: str = "") -> str:
    """Pattern of words that begin with capitals or consist of them. suffix: what may follow them.
    but: letters that are not meant."""
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}" + but + "]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}" + but + "]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{suffix}|{before}{upper}+{lower}*{suffix}"


_O200K = _cased(_SUFFIX + "?") + r"|\p{N}{1,3}" + _END_WITH_SLASH
_TEKKEN = _cased("") + r"|\p{N}" + _END_WITH_SLASH
_KIMI = r"\p{Han}+|" + _cased(_SUFFIX + "?", r"&&[^\p{Han}]") + r"|\p{N}{1,3}" + _END
_QWEN35 = (
    _SUFFIX + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _BLANKS
)
_DEEPSEEK_V2 = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*" + _BLANKS,
)


@dataclass(frozen=True)
class Splitting:
    """Rules by which text is split into words before tokens are merged. patterns: each splits what
    the one before it left. whole: a word that is a token is that token, whatever merges say.
    composed: text is put in normal form C. begins: files that do not say so want a first token."""

    patterns: tuple[str, ...]
    whole: bool = False
    composed: bool = False
    begins: bool = False

    def apply(self, tokenizer: Tokenizer) -> None:
        """Sets the rules of a tokenizer of bytes."""
        splits = [pre_tokenizers.Split(Regex(each), "isolated") for each in self.patterns]
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
        tokenizer.model.ignore_merges = self.whole
        if self.composed:
            tokenizer.normalizer = normalizers.NFC()


_THREE_DIGITS = _WORDS + "{1,3}" + _END
_ONE_DIGIT = _WORDS + _END
_LLAMA3 = Splitting((_THREE_DIGITS,), whole=True, begins=True)
_CODE = Splitting((r"\p{N}", _GPT2))
PRE = {  # by tokenizer.ggml.pre
    "gpt-2": Splitting((_GPT2,)),
    **dict.fromkeys(("smollm", "refact", "starcoder"), _CODE),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Splitting((_THREE_DIGITS,))),
    "glm4": Splitting((_THREE_DIGITS,), whole=True),
    "qwen2": Splitting((_ONE_DIGIT,), composed=True),
    "deepseek-r1-qwen": Splitting((_ONE_DIGIT,), composed=True),
    "qwen35": Splitting((_QWEN35,)),
    **dict.fromkeys(("gpt-4o", "minimax-m2"), Splitting((_O200K,))),
    "tekken": Splitting((_TEKKEN,), whole=True, begins=True),
    "kimi-k2": Splitting((_KIMI,)),
    "deepseek-llm": Splitting(_DEEPSEEK_V2),
    "deepseek-v3": Splitting(_DEEPSEEK),
}


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
    PRE[pre].apply(tokenizer)
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
    default = fields["tokenizer.ggml.model"] == "llama" or PRE[fields["tokenizer.ggml.pre"]].begins
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
