"""The tokenizer of one model: encodes, decodes, renders chats, detokenizes streams."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers

from jaxserve.api.errors import RequestError
from jaxserve.checkpoint.gguf_file import read_header
from jaxserve.checkpoint.model_files import read_text
from jaxserve.checkpoint.model_paths import CheckpointError, model_file, reason, resolve
from jaxserve.checkpoint.tokenizer_files import DEFAULT, TOOL_USE, TokenizerFacts
from jaxserve.text.added_tokens import completed
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.detokenizer import Detokenizer, pieces_of
from jaxserve.text.vocabulary import from_fields

_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")


class Tokenizer:
    """A model's tokenizer.

    vocab: number of ids. special_ids: ids that are not text. specials: texts of special tokens, by
    the names that templates give them. templates: chat templates by name.
    """

    def __init__(
        self,
        library: tokenizers.Tokenizer,
        specials: Mapping[str, str],
        templates: Mapping[str, str] = MappingProxyType({}),
    ):
        library.no_truncation()
        library.no_padding()
        self._library = library
        self.specials = dict(specials)
        self.templates = {
            name: ChatTemplate(text, self.specials) for name, text in templates.items()
        }
        added = library.get_added_tokens_decoder()
        self.vocab = library.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._pieces, self._strips = pieces_of(library)

    @property
    def ids(self) -> dict[str, int]:
        """The id of each token, by its text in the vocabulary."""
        return self._library.get_vocab(with_added_tokens=True)

    @classmethod
    def load(cls, source: str | Path) -> Tokenizer:
        """Loads the tokenizer of a folder, a GGUF file or a model's name. Errors:
        CheckpointError."""
        path = model_file(resolve(source))
        if path.is_dir():
            return cls.from_folder(path)
        return cls.from_gguf(path)

    @classmethod
    def from_folder(cls, folder: str | Path) -> Tokenizer:
        """Reads tokenizer.json, and the files of `TokenizerFacts` where they are."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(f"{path}: is missing{_hint(folder)}")
        text = read_text(path)
        try:
            library = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise CheckpointError(f"{path}: cannot be read ({error})") from None
        facts = TokenizerFacts.of_folder(folder)
        return cls(completed(library, facts, str(folder)), facts.specials, facts.templates or {})

    @classmethod
    def from_gguf(cls, path: str | Path) -> Tokenizer:
        """Builds the tokenizer that a GGUF file describes."""
        fields = read_header(path).fields
        try:
            library = from_fields(fields)
            facts = TokenizerFacts.of_gguf(fields)
            return cls(library, facts.specials, facts.templates or {})
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {reason(error)}") from None

    def save(self, folder: str | Path) -> None:
        """Writes what `from_folder` reads."""
        folder = Path(folder)
        self._library.save(str(folder / "tokenizer.json"), pretty=False)
        (folder / "tokenizer_config.json").write_text(json.dumps(self.config))

    @property
    def config(self) -> dict[str, Any]:
        """Contents of tokenizer_config.json."""
        config: dict[str, Any] = dict(self.specials)
        sources = {name: template.source for name, template in self.templates.items()}
        if list(sources) == [DEFAULT]:
            config["chat_template"] = sources[DEFAULT]
        elif sources:
            config["chat_template"] = [
                {"name": name, "template": source} for name, source in sources.items()
            ]
        return config | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
        }

    @property
    def template(self) -> ChatTemplate | None:
        """The template of chats without tools; None for a model without templates."""
        return self.templates.get(DEFAULT) or next(iter(self.templates.values()), None)

    @property
    def tool_template(self) -> ChatTemplate | None:
        """The template of chats with tools."""
        return self.templates.get(TOOL_USE) or self.template

    @property
    def template_text(self) -> str:
        """The text of the templates of chats; '' for a model without templates."""
        used = dict.fromkeys((self.tool_template, self.template))
        return "\n".join(template.source for template in used if template is not None)

    def to_json(self) -> str:
        """Returns the contents of tokenizer.json."""
        return self._library.to_str()

    def encode(self, text: str, special: bool = True, added: bool = True) -> list[int]:
        """Encodes a text. special: names of special tokens in the text become these tokens; else
        all of it is plain text, and nothing is added. added: the tokens that the model wants around
        a text, such as its first one, are added."""
        if special:
            return _ids(self._library, text, added)
        return _ids(self._plain, text, False)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Decodes ids; broken characters become U+FFFD, unknown ids nothing."""
        stream = self.stream(skip_special)
        return stream.push(*ids) + stream.flush()

    def piece(self, id: int) -> bytes:
        """The bytes that an id stands for."""
        return self._pieces[id] if 0 <= id < len(self._pieces) else b""

    def is_token(self, text: str) -> bool:
        """Returns True if a text is a token of its own."""
        return self._library.token_to_id(text) is not None

    def stream(self, skip_special: bool = True, prompt: Iterable[int] = ()) -> Detokenizer:
        """Returns a detokenizer for a stream of ids that continues the text of a prompt."""
        skipped = self.special_ids if skip_special else frozenset()
        begins = not any(self.piece(id) for id in prompt if id not in skipped)
        return Detokenizer(self._pieces, skipped, self._strips and begins)

    def positions(self, text: str, ids: Iterable[int]) -> list[int]:
        """Returns where each of a text's tokens begins in it, in characters. Special tokens that
        the text does not name, such as the first one, take up no room in it."""
        stream = self.stream(skip_special=False)
        found = []
        for id in ids:
            unnamed = id in self.special_ids and not text.startswith(
                self.piece(id).decode(errors="replace"), stream.length
            )
            found += [stream.length] if unnamed else stream.positions(id)
        return [min(position, len(text)) for position in found]

    def render(self, messages: Sequence[Mapping[str, Any]], **rest: Any) -> str:
        """Renders a conversation with the model's chat template; rest: as of `ChatTemplate.render`.
        Errors: RequestError."""
        template = self.tool_template if rest.get("tools") else self.template
        if template is None:
            raise RequestError("messages", "this model has no chat template; send a prompt instead")
        return template.render(messages, **rest)

    def chat(self, messages: Sequence[Mapping[str, Any]], **rest: Any) -> list[int]:
        """Encodes a conversation. The template itself writes the first token if the model wants
        one."""
        return _ids(self._library, self.render(messages, **rest), False)

    @functools.cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """A copy that takes the names of special tokens for text."""
        copy = tokenizers.Tokenizer.from_str(self._library.to_str())
        copy.encode_special_tokens = True
        return copy


def _ids(library: tokenizers.Tokenizer, text: str, first: bool) -> list[int]:
    """Encodes a text as a batch of one, for which the library releases the GIL. first: add the
    model's first token. Errors: UnicodeEncodeError."""
    try:
        return library.encode_batch_fast([text], add_special_tokens=first)[0].ids
    except TypeError:
        text.encode()  # names a lone surrogate, of which the library only says "not a text"
        raise


def _hint(folder: Path) -> str:
    """Says what to do about a folder with a tokenizer of another kind."""
    others = [name for name in _OTHER_TOKENIZERS if (folder / name).exists()]
    if not others:
        return ""
    return (
        f"; {others[0]} is not read: in Python, transformers makes it with "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )
