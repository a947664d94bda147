"""Facts about a tokenizer that stand beside tokenizer.json, as transformers reads them.

For each fact the files in which it may stand, the first one that has it first:

- special tokens (bos_token, eos_token, ...): tokenizer_config.json, then special_tokens_map.json;
  the other way round where tokenizer_config.json has no added_tokens_decoder.
- added tokens: added_tokens_decoder of tokenizer_config.json, else added_tokens.json. Their flags
  go before those in tokenizer.json; ids are those of tokenizer.json, for tokens that it has.
- chat templates: chat_template.jinja is `default`, additional_chat_templates/NAME.jinja is NAME.
  Where there are such files, tokenizer_config.json only adds a `default` that they lack. Else
  chat_template of tokenizer_config.json, one template or a list of {name, template}, else
  chat_template.json.

A GGUF file has special tokens by id, and the templates tokenizer.chat_template (`default`) and
tokenizer.chat_template.NAME.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.checkpoint.model_files import notes, read_object, read_text

DEFAULT = "default"
TOOL_USE = "tool_use"
TEMPLATE_FOLDER = "additional_chat_templates"
GGUF_TEMPLATE = "tokenizer.chat_template"
_FLAGS = ("special", "single_word", "lstrip", "rstrip", "normalized")
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
# known ends of turns: many GGUF files name another token, or none, as their end
_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<turn|>",
)
_GGUF_SPECIALS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",
    "mask_token": "mask",
}


@dataclass(frozen=True)
class AddedToken:
    """A token that text is searched for before it is split. flags: by the names that the library
    `tokenizers` gives them."""

    text: str
    flags: Mapping[str, bool]

    @property
    def special(self) -> bool:
        return self.flags.get("special", False)


@dataclass(frozen=True)
class TokenizerFacts:
    """Facts about a tokenizer.

    specials: special tokens by the names that templates give them. extra: special tokens without a
    name. added: added tokens by id. templates: chat templates by name. vocab: number of ids that
    the model has; None where its files do not say.
    """

    specials: Mapping[str, str]
    extra: Sequence[str] = ()
    added: Mapping[int, AddedToken] | None = None
    templates: Mapping[str, str] | None = None
    vocab: int | None = None

    @classmethod
    def of_folder(cls, folder: Path) -> TokenizerFacts:
        """Reads the files of a folder. Errors: CheckpointError for one that cannot be read."""
        path = folder / "tokenizer_config.json"
        config = read_object(path)
        special_map = read_object(folder / "special_tokens_map.json")
        sources = [config, special_map]
        if "added_tokens_decoder" not in config:
            sources.reverse()
        specials = _named_tokens(sources[1]) | _named_tokens(sources[0])
        extra = [text for source in (special_map, config) for text in _extra_tokens(source)]
        decoder = config.get("added_tokens_decoder")
        if isinstance(decoder, dict):
            added = dict(_added_tokens(path, decoder))
        else:
            texts = {*specials.values(), *extra}
            added = dict(_older_added_tokens(folder / "added_tokens.json", texts))
        return cls(
            specials,
            tuple(dict.fromkeys(extra)),
            added,
            _folder_templates(folder, config),
            _vocab_size(folder),
        )

    @classmethod
    def of_gguf(cls, fields: Mapping[str, Any]) -> TokenizerFacts:
        """Reads the metadata of a GGUF file, which has a list of tokens."""
        tokens = fields["tokenizer.ggml.tokens"]
        ids = {
            name: fields.get(f"tokenizer.ggml.{key}_token_id")
            for name, key in _GGUF_SPECIALS.items()
        }
        specials = {
            name: tokens[i]
            for name, i in ids.items()
            if isinstance(i, int) and 0 <= i < len(tokens)
        }
        found = {
            key.removeprefix(GGUF_TEMPLATE).removeprefix(".") or DEFAULT: text
            for key, text in fields.items()
            if key == GGUF_TEMPLATE or key.startswith(f"{GGUF_TEMPLATE}.")
        }
        return cls(specials, templates=_texts(found))


def turn_ends(fields: Mapping[str, Any]) -> list[int]:
    """Returns the ids of tokens of a GGUF file that end a turn by their text, and that its chat
    template writes."""
    tokens = fields.get("tokenizer.ggml.tokens") or ()
    template = str(fields.get(GGUF_TEMPLATE, ""))
    return [tokens.index(text) for text in _TURN_ENDS if text in template and text in tokens]


def eos_id(folder: Path) -> int | None:
    """Returns the id of the eos_token of a folder's tokenizer; None where it has none. Errors:
    CheckpointError."""
    facts = TokenizerFacts.of_folder(folder)
    text = facts.specials.get("eos_token")
    if text is None:
        return None
    for id, token in (facts.added or {}).items():
        if token.text == text:
            return id
    return _id_of(text, read_object(folder / "tokenizer.json"))


def _id_of(text: str, library: Mapping[str, Any]) -> int | None:
    """Returns the id of a token in the content of a tokenizer.json."""
    for token in library.get("added_tokens") or ():
        if isinstance(token, dict) and token.get("content") == text:
            return token.get("id")
    model = library.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return vocabulary.get(text) if isinstance(vocabulary, dict) else None


def _vocab_size(folder: Path) -> int | None:
    """Returns the number of ids that a folder's model has."""
    config = read_object(folder / "config.json")
    part = config.get("text_config")
    size = (part if isinstance(part, dict) else config).get("vocab_size")
    return size if isinstance(size, int) else None


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens of a JSON file by name."""
    named = config.get("extra_special_tokens")
    entries = {**(named if isinstance(named, dict) else {}), **config}
    return _texts({name: value for name, value in entries.items() if name.endswith("_token")})


def _extra_tokens(config: Mapping[str, Any]) -> list[str]:
    """Returns the special tokens of a JSON file that have no name."""
    lists = [config.get(name) for name in _EXTRA]
    entries = [entry for value in lists if isinstance(value, list) for entry in value]
    return list(_texts(dict(enumerate(entries))).values())


def _texts(entries: Mapping[Any, Any]) -> dict[Any, str]:
    """Returns those entries that are a text, or an object with one as its content."""
    contents = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in entries.items()
    }
    return {key: text for key, text in contents.items() if isinstance(text, str) and text}


def _added_tokens(path: Path, decoder: Mapping[str, Any]) -> Iterator[tuple[int, AddedToken]]:
    """Reads added_tokens_decoder; entries that are no tokens are left out, and said."""
    for id, entry in decoder.items():
        text = entry.get("content") if isinstance(entry, dict) else None
        if not id.isdecimal() or not isinstance(text, str) or not text:
            notes.warning(
                f"{path}: left out of added_tokens_decoder: {id[:40]!r}, which is no token"
            )
            continue
        flags = {name: entry[name] for name in _FLAGS if isinstance(entry.get(name), bool)}
        yield int(id), AddedToken(text, flags)


def _older_added_tokens(path: Path, specials: set[str]) -> Iterator[tuple[int, AddedToken]]:
    """Reads added_tokens.json: ids by text. specials: the texts of special tokens."""
    for text, id in read_object(path).items():
        if isinstance(id, bool) or not isinstance(id, int) or id < 0 or not text:
            notes.warning(f"{path}: left out: {text[:40]!r}, whose id is {str(id)[:40]}")
            continue
        special = text in specials
        yield id, AddedToken(text, {"special": special, "normalized": not special})


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Returns the chat templates of a folder by name."""
    oldest = read_object(folder / "chat_template.json")
    older = _config_templates(config.get("chat_template") or oldest.get("chat_template"))
    files = {path.stem: path for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        files[DEFAULT] = folder / "chat_template.jinja"
    if not files:
        return older
    newer = {name: read_text(path) for name, path in files.items()}
    return {name: text for name, text in older.items() if name == DEFAULT} | newer


def _config_templates(template: Any) -> dict[str, str]:
    """Returns the chat templates in a field that holds one, a list of {name, template}, or an
    object of texts by name."""
    if isinstance(template, list):
        named = [entry for entry in template if isinstance(entry, dict)]
        template = {str(entry.get("name")): entry.get("template") for entry in named}
    return _texts(template if isinstance(template, dict) else {DEFAULT: template})
