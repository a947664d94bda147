"""Token ids to text: the bytes that each id stands for, and a stream of ids as text.

A vocabulary is byte level, or SentencePiece's: its tokens have a sign for blanks, with one before
the first word of a text, which decoding leaves out again.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tokenizers

from jaxserve.checkpoint.model_paths import CheckpointError

_SPACE = "\u2581"


class Detokenizer:
    """Detokenizes a stream of ids. The pieces that `push` and `flush` return join to what decoding
    all ids at once gives; a character is returned once all its bytes have come.

    pieces: bytes by id. skipped: ids that are not text. strips: leave out the blank before the
    first word. length: characters that were returned so far.
    """

    def __init__(self, pieces: Sequence[bytes], skipped: frozenset[int], strips: bool):
        self.length = 0
        self._pieces = pieces
        self._skipped = skipped
        self._strips = strips
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, *ids: int) -> str:
        return self._text(b"".join(self._bytes(ids)))

    def positions(self, *ids: int) -> list[int]:
        """Pushes ids; returns where each begins in the text: the place of the character that has
        its first byte."""
        found = []
        for piece in self._bytes(ids):
            self._text(piece[:1])
            pending, _ = self._decoder.getstate()
            whole = bool(piece) and self.length > 0 and not pending
            found.append(self.length - whole)
            self._text(piece[1:])
        return found

    def flush(self) -> str:
        """Ends the stream; returns U+FFFD for a character whose last bytes never came."""
        return self._decoded(b"", True)

    def _bytes(self, ids: Sequence[int]) -> Iterator[bytes]:
        for id in ids:
            known = 0 <= id < len(self._pieces) and id not in self._skipped
            yield self._pieces[id] if known else b""

    def _text(self, piece: bytes) -> str:
        if self._strips and piece:
            self._strips = False
            piece = piece.removeprefix(b" ")
        return self._decoded(piece, False)

    def _decoded(self, piece: bytes, last: bool) -> str:
        text = self._decoder.decode(piece, last)
        self.length += len(text)
        return text


def pieces_of(library: tokenizers.Tokenizer) -> tuple[list[bytes], bool]:
    """Returns the bytes of each id, and whether a leading space is stripped from a text."""
    byte_level, strips = _decoder_kind(library)
    alphabet = {char: byte for byte, char in enumerate(byte_alphabet())}
    vocabulary = library.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, i in vocabulary.items():
        pieces[i] = _byte_level_piece(alphabet, token) if byte_level else _spaced_piece(token)
    return pieces, strips


def _decoder_kind(library: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """(byte level, strips a leading space). Errors: CheckpointError for decoders that are neither
    byte level nor SentencePiece's."""
    decoder: Any = library.decoder
    state: dict[str, Any] = {"type": None}
    if decoder is not None:
        state = json.loads(decoder.__getstate__())
    steps: list[Any] = state.get("decoders", [state])
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False
    if kinds == ["Metaspace"] and steps[0].get("replacement") == _SPACE:
        return False, steps[0].get("prepend_scheme") != "never"
    replaces = [step for step in steps if step["type"] == "Replace"]
    strips = [step for step in steps if step["type"] == "Strip"]
    if (
        set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}
        and len(replaces) == 1
        and len(strips) <= 1
        and (replaces[0]["pattern"], replaces[0]["content"]) == ({"String": _SPACE}, " ")
        and all((s["content"], s["start"], s["stop"]) == (" ", 1, 0) for s in strips)
    ):
        return False, bool(strips)
    raise CheckpointError(
        f"the tokenizer's decoder {kinds} is not supported; byte level and SentencePiece "
        "decoders are"
    )


def byte_alphabet() -> list[str]:
    """The character that byte-level vocabularies write for each byte: itself where it is printable,
    else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _byte_level_piece(alphabet: Mapping[str, int], token: str) -> bytes:
    """Added tokens may hold characters that are not in the alphabet; they are plain text."""
    found = [alphabet.get(char) for char in token]
    return token.encode() if None in found else bytes(found)  # type: ignore[arg-type]


def _spaced_piece(token: str) -> bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode()
