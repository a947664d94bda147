"""Adds to a tokenizer of the library the tokens that only stand in files beside tokenizer.json."""

from __future__ import annotations

import json

import tokenizers

from jaxserve.checkpoint.model_files import notes
from jaxserve.checkpoint.tokenizer_files import AddedToken, TokenizerFacts


def completed(
    library: tokenizers.Tokenizer, facts: TokenizerFacts, place: str
) -> tokenizers.Tokenizer:
    """Returns a tokenizer with the added and special tokens of `facts` that the model has ids for;
    others are left out, and said. place: the name of the files, for that."""
    library = _within(library, facts.vocab, place)
    special = {
        token.content for token in library.get_added_tokens_decoder().values() if token.special
    }
    for id, token in sorted((facts.added or {}).items()):
        if _has_room(library, id, token, facts.vocab):
            _add(library, token, token.special or token.text in special)
        else:
            notes.warning(
                f"{place}: left out the added token {token.text!r}, which cannot have id {id}"
            )
    for text in (*facts.specials.values(), *facts.extra):
        size = library.get_vocab_size()
        if library.token_to_id(text) is None and (facts.vocab is None or size < facts.vocab):
            _add(library, AddedToken(text, {"normalized": False}), special=True)
    return library


def _within(library: tokenizers.Tokenizer, vocab: int | None, place: str) -> tokenizers.Tokenizer:
    """Returns a tokenizer without added tokens whose ids the model does not have."""
    added = library.get_added_tokens_decoder()
    beyond = [token.content for id, token in added.items() if vocab is not None and id >= vocab]
    if not beyond:
        return library
    notes.warning(f"{place}: left out added tokens beyond the model's {vocab} ids: {beyond[:10]}")
    state = json.loads(library.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < vocab]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def _has_room(library: tokenizers.Tokenizer, id: int, token: AddedToken, vocab: int | None) -> bool:
    """Returns True if the library gives a token this id: one that it has already, or the next."""
    present = library.token_to_id(token.text)
    if present is not None:
        return present == id
    return id == library.get_vocab_size() and (vocab is None or id < vocab)


def _add(library: tokenizers.Tokenizer, token: AddedToken, special: bool) -> None:
    added = tokenizers.AddedToken(token.text, **{**token.flags, "special": special})
    if special:
        library.add_special_tokens([added])
    else:
        library.add_tokens([added])
