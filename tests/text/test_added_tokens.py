"""Tokens that stand in files beside tokenizer.json; the templates of a folder by name."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.text import Tokenizer
from tests.text.vocabulary import alphabet

END = 256  # the first id behind the bytes
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
HELLO = [{"role": "user", "content": "hello"}]


def load(folder, *specials, vocab=None, **files):
    """A tokenizer of bytes with special tokens from END on; `__` in a name stands for a point."""
    library = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet())}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(list(specials))
    library.save(str(folder / "tokenizer.json"))
    if vocab is not None:
        files["config__json"] = {"vocab_size": vocab}
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return Tokenizer.from_folder(folder)


def decoder(**tokens):
    return {"added_tokens_decoder": {number[1:]: token for number, token in tokens.items()}}


def test_added_tokens_of_the_config_are_tokens(tmp_path):
    config = decoder(
        _258={"content": "<call>", "special": False, "normalized": False},
        _257={"content": "<turn>", "special": True, "normalized": False},
    )
    tokenizer = load(tmp_path, "<end>", tokenizer_config__json=config)
    assert tokenizer.encode("a<turn><call>") == [ord("a"), 257, 258]
    assert tokenizer.decode([257, 258]) == "<call>"
    assert tokenizer.encode("<call><turn>", special=False)[0] == 258
    assert tokenizer.special_ids == {256, 257}


def test_flags_of_the_config_go_before_those_of_the_tokenizer(tmp_path):
    config = decoder(_256={"content": "<end>", "special": True, "lstrip": True, "rstrip": True})
    tokenizer = load(tmp_path, "<end>", tokenizer_config__json=config)
    assert tokenizer.encode("a  <end> a") == [ord("a"), 256, ord("a")]


def test_a_token_is_special_where_any_file_says_so(tmp_path):
    config = decoder(_256={"content": "<end>", "special": False, "normalized": False})
    tokenizer = load(tmp_path, "<end>", tokenizer_config__json=config)
    assert tokenizer.special_ids == {256} and tokenizer.decode([97, 256]) == "a"


def test_older_added_tokens_and_named_ones_are_tokens_too(tmp_path):
    tokenizer = load(
        tmp_path,
        added_tokens__json={"<b>": 257, "<a>": 256},
        special_tokens_map__json={"pad_token": "<a>", "unk_token": "<u>"},
    )
    assert tokenizer.encode("<a><b><u>") == [256, 257, 258]
    assert tokenizer.special_ids == {256, 258}


@pytest.mark.parametrize(
    "id, text", [("300", "<far>"), ("0", "<far>"), ("300", "<end>"), ("257", "<beyond>")]
)
def test_a_token_that_cannot_have_its_id_is_left_out_and_said(id, text, tmp_path, caplog):
    config = decoder(**{f"_{id}": {"content": text, "special": True}})
    tokenizer = load(tmp_path, "<end>", vocab=257, tokenizer_config__json=config)
    assert tokenizer.vocab == 257 and tokenizer.encode("<end>") == [256]
    assert f"left out the added token {text!r}, which cannot have id {id}" in caplog.text


def test_names_of_tokens_beyond_the_models_ids_are_plain_text(tmp_path, caplog):
    tokenizer = load(tmp_path, "<end>", "<pad>", vocab=257)
    assert tokenizer.encode("<end>") == [256] and tokenizer.vocab == 257
    assert tokenizer.decode(tokenizer.encode("<pad>")) == "<pad>"
    assert "left out added tokens beyond the model's 257 ids: ['<pad>']" in caplog.text


def test_a_named_token_is_no_token_where_the_model_has_no_id_for_it(tmp_path):
    names = {"bos_token": "<s>"}
    tokenizer = load(tmp_path, "<end>", vocab=257, tokenizer_config__json=names)
    assert tokenizer.vocab == 257 and tokenizer.specials == names
    assert not tokenizer.is_token("<s>")


def test_chats_with_tools_have_the_template_for_tools(tmp_path):
    named = {"default": "plain", "tool_use": "{{ tools | length }} tools"}
    templates = [{"name": name, "template": text} for name, text in named.items()]
    tokenizer = load(tmp_path, "<end>", tokenizer_config__json={"chat_template": templates})
    assert tokenizer.render(HELLO) == tokenizer.render(HELLO, tools=[]) == "plain"
    assert tokenizer.render(HELLO, tools=TOOLS) == "1 tools"
    assert tokenizer.config["chat_template"] == templates
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path).render(HELLO, tools=TOOLS) == "1 tools"


def test_a_model_whose_only_template_has_a_name_uses_it(tmp_path):
    only = [{"name": "chatml", "template": "{{ messages[0].content }}"}]
    tokenizer = load(tmp_path, "<end>", tokenizer_config__json={"chat_template": only})
    assert tokenizer.render(HELLO) == "hello"


def test_a_byte_order_mark_is_skipped_in_every_file(tmp_path):
    config = decoder(_256={"content": "<end>", "special": True}) | {"eos_token": "<end>"}
    load(tmp_path, tokenizer_config__json=config, chat_template__jinja="{{ eos_token }}!")
    for file in tmp_path.iterdir():
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.render(HELLO) == "<end>!" and tokenizer.chat(HELLO)[0] == END
