"""Tokens of the real model from both of its sources, streams of text, vocabularies of other kinds,
and chat templates."""

import functools
import json
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.api.errors import RequestError
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.text import Tokenizer, vocabulary
from jaxserve.text.chat_template import ChatTemplate
from jaxserve.text.template_sandbox import MAX_ITERATIONS
from tests.examples import examples

SPACE = "\u2581"


@pytest.fixture(scope="module", params=["gguf", "folder"])
def smollm2(request, smollm2_gguf, smollm2_first_layers):
    return Tokenizer.load(smollm2_gguf if request.param == "gguf" else smollm2_first_layers)


@pytest.fixture(scope="module")
def from_gguf(smollm2_gguf):
    return Tokenizer.load(smollm2_gguf)


@functools.cache
def library_of(tokenizer):
    return tokenizers.Tokenizer.from_str(tokenizer.to_json())


def test_golden_texts_have_their_ids(smollm2, golden):
    for case in golden["tokenizer_cases"]:
        assert smollm2.encode(case["text"]) == case["ids"]
        assert smollm2.decode(case["ids"], skip_special=False) == case["text"]
    assert smollm2.vocab == 49152


def test_golden_prompts_and_chats_have_their_ids(smollm2, golden):
    assert {"prompt", "messages"} <= {key for case in golden["cases"] for key in case}
    for case in golden["cases"]:
        if "messages" in case:
            assert smollm2.render(case["messages"]) == case["rendered"]
            assert smollm2.chat(case["messages"]) == case["prompt_ids"]
        elif "prompt" in case:
            assert smollm2.encode(case["prompt"]) == case["prompt_ids"]
        assert smollm2.decode(case["output_ids"], skip_special=False) == case["text"]


def test_special_tokens_are_text_where_asked(smollm2):
    assert smollm2.encode("<|im_end|>") == [2]
    ids = smollm2.encode("<|im_end|>", special=False)
    assert 2 not in ids and smollm2.decode(ids) == "<|im_end|>"
    assert smollm2.decode([2, *smollm2.encode("a"), 2]) == "a"
    assert smollm2.decode([10**6, -1, *smollm2.encode("a")]) == "a"


@settings(max_examples=examples(100), deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), cut=st.integers(1, 5))
def test_streams_say_what_the_library_says_without_half_characters(from_gguf, ids, cut):
    expected = library_of(from_gguf).decode(ids, skip_special_tokens=True)
    assert from_gguf.decode(ids) == expected
    stream = from_gguf.stream()
    parts = [stream.push(*ids[i : i + cut]) for i in range(0, len(ids), cut)]
    assert "".join(parts) + stream.flush() == expected


@settings(max_examples=examples(60), deadline=None)
@given(text=st.text("ab 1\n\té你好🚀<|im_end>", max_size=30))  # the vocabulary lacks some bytes
def test_text_survives_encoding_and_streaming(from_gguf, text):
    stream = from_gguf.stream(skip_special=False)
    seen = ""
    for token in from_gguf.encode(text, special=False):
        seen += stream.push(token)
        assert text.startswith(seen)
    assert seen + stream.flush() == text


def test_a_character_comes_out_with_its_last_byte(smollm2):
    ids = smollm2.encode("🚀")
    stream = smollm2.stream()
    assert (
        len(ids) > 1
        and [stream.push(i) for i in ids] == [""] * (len(ids) - 1) + ["🚀"]
        and stream.flush() == ""
    )
    stream = smollm2.stream()
    assert stream.push(ids[0]) + stream.flush() == "\ufffd" == smollm2.decode(ids[:1])


def test_a_saved_tokenizer_is_the_same(smollm2, tmp_path):
    smollm2.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    text = "a  2 naïve 你好 <|im_start|>x"
    assert again.encode(text) == smollm2.encode(text) and again.special_ids == smollm2.special_ids
    assert again.render([{"role": "user", "content": "x"}]) == smollm2.render(
        [{"role": "user", "content": "x"}]
    )


@pytest.mark.parametrize(
    "pre, text, words",
    [
        (
            "llama-bpe",
            "It's 12345 a\n\n  b!?",
            ["It", "'s", " ", "123", "45", " a", "\n\n", " ", " b", "!?"],
        ),
        ("qwen2", "It'S 123 x", ["It", "'S", " ", "1", "2", "3", " x"]),
        ("gpt-2", "It's 123  x", ["It", "'s", " 123", " ", " x"]),
        ("smollm", "a 12", ["a", " ", "1", "2"]),
    ],
)
def test_text_is_split_as_the_vocabulary_names(pre, text, words):
    library = vocabulary.from_fields(byte_level(pre))
    pieces = [piece for piece, _ in library.pre_tokenizer.pre_tokenize_str(text)]
    assert [piece.replace("Ġ", " ").replace("Ċ", "\n") for piece in pieces] == words


def byte_level(pre, tokens=(), merges=(), **more):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ends = ["<s>", "</s>"]
    types = [1] * len([*alphabet, *tokens]) + [3, 3]
    every = [*alphabet, *tokens, *ends]
    return {
        f"tokenizer.ggml.{key}": value
        for key, value in {
            "model": "gpt2",
            "pre": pre,
            "tokens": every,
            "merges": list(merges),
            "token_type": types,
            "bos_token_id": len(every) - 2,
            "eos_token_id": len(every) - 1,
            **more,
        }.items()
    }


def test_llama3_words_that_are_tokens_need_no_merges_and_texts_begin_with_bos():
    fields = byte_level("llama-bpe", ["abc"])
    library = vocabulary.from_fields(fields)
    tokens = fields["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in library.encode("abc").ids] == ["<s>", "abc"]
    assert [
        tokens[i] for i in vocabulary.from_fields(byte_level("qwen2", ["abc"])).encode("abc").ids
    ] == ["a", "b", "c"]
    without = vocabulary.from_fields(
        byte_level("llama-bpe", add_bos_token=False, add_eos_token=True)
    )
    assert [without.id_to_token(i) for i in without.encode("a").ids] == ["a", "</s>"]


def test_names_of_special_tokens_are_tokens_without_what_the_model_adds():
    tokenizer = Tokenizer(vocabulary.from_fields(byte_level("llama-bpe", ["abc"])), {})
    (begin,) = tokenizer.encode("<s>", added=False)
    (end,) = tokenizer.encode("</s>", added=False)
    assert tokenizer.encode("</s>") == [begin, end]
    assert not {begin, end} & set(tokenizer.encode("</s>", special=False))


def test_sentencepiece_vocabularies_merge_by_score_and_fall_back_to_bytes():
    pieces = {"<unk>": 0, "<s>": 0, "</s>": 0} | {f"<0x{b:02X}>": 0 for b in range(256)}
    pieces |= {SPACE: -9, "a": -1, "b": -2, "c": -3, "bc": -0.5, "ab": -0.7, f"{SPACE}a": -0.9}
    types = [2, 3, 3] + [6] * 256 + [1] * 7
    fields = {
        f"tokenizer.ggml.{key}": value
        for key, value in {
            "model": "llama",
            "tokens": list(pieces),
            "scores": list(pieces.values()),
            "token_type": types,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "unknown_token_id": 0,
        }.items()
    }
    tokenizer = Tokenizer(vocabulary.from_fields(fields), {})
    names = list(pieces)

    def tokens(text):
        return [names[i] for i in tokenizer.encode(text)]

    assert tokens("abc") == ["<s>", f"{SPACE}a", "bc"]  # bc scores best, then the rest
    assert tokens("ab") == ["<s>", SPACE, "ab"]
    assert tokens("é") == ["<s>", SPACE, "<0xC3>", "<0xA9>"]
    for text in ("abc", "a  b", " abc", "é🚀a"):
        ids = tokenizer.encode(text)
        stream = tokenizer.stream()
        parts = [stream.push(i) for i in ids]
        assert (
            tokenizer.decode(ids)
            == "".join(parts) + stream.flush()
            == text
            == library_of(tokenizer).decode(ids)
        )
        assert not any("\ufffd" in part for part in parts)


DIGITS = ("1", "2", "3", "4")
THREE = ("123", "4")
CASED = (" Hello", "World")
SLASHES = (" a", "/b", "//\n\n", " x")
SINGLE = (" a", "/", "b", "//", "\n\n", " x")


@pytest.mark.parametrize(
    "pre, words",
    [
        ("gpt-2", ("I", "'", "LL", " HelloWorld", " 1234", " 中文の", *SINGLE)),
        ("smollm", ("I", "'", "LL", " HelloWorld", " ", *DIGITS, " 中文の", *SINGLE)),
        ("llama3", ("I", "'LL", " HelloWorld", " ", *THREE, " 中文の", *SLASHES)),
        ("qwen2", ("I", "'LL", " HelloWorld", " ", *DIGITS, " 中文の", *SLASHES)),
        ("qwen35", ("I", "'LL", " HelloWorld", " ", *DIGITS, " 中文の", *SLASHES)),
        ("gpt-4o", ("I'LL", *CASED, " ", *THREE, " 中文の", *SLASHES)),
        ("tekken", ("I", "'LL", *CASED, " ", *DIGITS, " 中文の", *SLASHES)),
        ("kimi-k2", ("I'LL", *CASED, " ", *THREE, " ", "中文", "の", *SLASHES)),
        ("deepseek-v3", ("I", "'LL", " HelloWorld", " ", *THREE, " ", "中文の", *SLASHES)),
    ],
)
def test_text_is_split_into_the_words_of_each_rule(pre, words):
    library = vocabulary.from_fields(byte_level(pre))
    text = "I'LL HelloWorld 1234 中文の a/b//\n\n x"
    found = library.pre_tokenizer.pre_tokenize_str(text)
    assert tuple(text[first:last] for _, (first, last) in found) == words


@pytest.mark.parametrize(
    "change, message",
    [
        ({"tokenizer.ggml.pre": "falcon"}, "pre: 'falcon' is not one of gpt-2, smollm"),
        ({"tokenizer.ggml.pre": None}, "None is not one of"),
        ({"tokenizer.ggml.model": "t5"}, "'t5' is not one of gpt2, llama"),
        ({"tokenizer.ggml.tokens": None}, "is missing"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "given more than once"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "does not merge two tokens"),
        ({"tokenizer.ggml.merges": ["a b"]}, "does not merge two tokens"),
        ({"tokenizer.ggml.merges": 3}, "merges: is missing"),
        ({"tokenizer.ggml.model": "llama"}, "scores: there must be one for each"),
    ],
)
def test_vocabularies_that_are_not_known_are_refused(change, message):
    with pytest.raises(CheckpointError, match=message):
        vocabulary.from_fields(byte_level("gpt-2") | change)


def test_folders_without_a_usable_tokenizer_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: is missing$"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"sentencepiece")
    with pytest.raises(CheckpointError, match=r"missing; tokenizer\.model is not read: in Python"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.from_folder(tmp_path)
    library = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=r"decoder \['WordPiece'\] is not supported"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: must hold an object"):
        Tokenizer.from_folder(tmp_path)


def test_templates_come_from_config_list_or_file_and_special_tokens_have_two_forms(
    smollm2, tmp_path
):
    smollm2.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"},
    ]
    path.write_text(
        json.dumps(
            {
                "chat_template": named,
                "bos_token": {"content": "<|im_start|>"},
                "eos_token": "<|im_end|>",
            }
        )
    )
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.render([{"role": "user", "content": "hi"}]) == "<|im_start|>hi"
    assert tokenizer.chat([{"role": "user", "content": "hi"}])[0] == 1
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert (
        Tokenizer.from_folder(tmp_path).render([{"role": "user", "content": "hi"}]) == "from a file"
    )
    path.write_text("{}")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="no chat template"):
        Tokenizer.from_folder(tmp_path).render([{"role": "user", "content": "hi"}])


def rendered(source, *contents, **specials):
    return ChatTemplate(source, specials).render([{"role": "user", "content": c} for c in contents])


def test_templates_have_the_helpers_of_transformers():
    assert rendered("{{ messages[0] | tojson }}", "<é>") == '{"role": "user", "content": "<é>"}'
    assert rendered("{{ strftime_now('%Y') }}", "x") == time.strftime("%Y")
    numbers = (
        "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ loop.index "
        "}}/{{ loop.length }};{% endfor %}"
    )
    assert rendered(numbers, *"abc") == "1/3;2/3;"
    assert (
        rendered("{% generation %}{{ bos_token }}{% endgeneration %}", "x", bos_token="<s>")
        == "<s>"
    )
    assert (
        rendered(
            "{%- for m in messages if m.role == 'user' %}\n    {{ m.content }}\n{%- endfor %}",
            "a",
            "b",
        )
        == "    a    b"
    )
    assert (
        rendered("{{ tools is none }}{{ add_generation_prompt }}{{ '-' * 3 }}", "x")
        == "TrueTrue---"
    )
    assert (
        rendered(
            "{{ messages[0].content }}",
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        )
        == "a\nb"
    )
    with pytest.raises(RequestError, match=r"messages: .*roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}", "x")


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"required": ["at"]}}}]
FUNCTIONS = json.dumps([TOOLS[0]["function"]], indent=4)


def with_tools(source, tools):
    return ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], tools=tools)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (  # as Kimi K2's
            "{% set ns = namespace(ids=[]) %}{% for t in tools %}"
            "{% set _ = ns.ids.append(t.function.name) %}{% endfor %}{{ ns.ids.pop(0) }}",
            "look",
        ),
        ("{{ tools | map(attribute='type') | tojson }}", '["function"]'),
        ("{% set _ = tools[0].function.parameters.required.append('no') %}", ""),
        # as Firefunction's
        ("{# functools #}{{ functions }}{{ datetime | length }}", f"{FUNCTIONS}19"),
    ],
)
def test_templates_take_tools_as_their_authors_wrote_them(source, text):
    assert with_tools(source, TOOLS) == text
    assert TOOLS[0]["function"]["parameters"]["required"] == ["at"]


def test_variables_of_a_request_are_json_of_a_limited_length():
    template = ChatTemplate("{{ names | join('-') }}{{ more.a }}", {})
    chat = [{"role": "user", "content": "x"}]
    assert template.render(chat, values={"names": ["a", "b"], "more": {"a": 1}}) == "a-b1"
    for wrong in ({"names": ["x" * 2**14]}, {"messages": []}):
        with pytest.raises(RequestError, match="chat_template_kwargs"):
            template.render(chat, values=wrong)


def test_templates_that_need_a_list_of_tools_have_an_empty_one():
    source = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ tools | length }}"
    assert (with_tools(source, []), with_tools(source, TOOLS)) == ("0", "look1")
    assert with_tools("{{ tools is none }}", []) == "True"


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{% set x = messages[0].content %}{% for a in x %}{% for b in x %}{% for c in x %}{% "
        "endfor %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
        "{{ range(10**9) }}",
        "{{ 'x' * 10**10 }}",
        "{{ 'x' * 9999999999 }}",
        "{{ 9 ** 9 ** 9 ** 9 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.clear() }}",
        "{{ messages.extend(messages) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ nothing.at.all }}",
        "{% if %}",
        "{{ self._TemplateReference__context.environment }}",
        "{% set iterations_left = namespace(left=1) %}{% for i in [1] %}{% endfor %}",
    ],
)
def test_templates_that_attack_or_fail_are_cut_short(source):
    with pytest.raises(RequestError, match="messages: the model's chat template fails"):
        rendered(source, "x" * 1000)


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "at least one"),
        ("hi", "must be a list"),
        ([1], "message 0 is not an object"),
        ([{"content": "x"}], "with a role"),
        ([{"role": "user"}], "has no content"),
        ([{"role": "user", "content": 3}], "has no content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "parts that are not text"),
        ([{"role": 1, "content": "x"}], "with a role"),
    ],
)
def test_messages_that_are_none_are_refused(messages, message):
    with pytest.raises(RequestError, match=message) as error:
        ChatTemplate("x", {}).render(messages)
    assert error.value.field == "messages"


def test_long_chats_are_within_the_bounds():
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    assert len(rendered(source, *["word " * 50] * 5000)) > 1_000_000
    assert MAX_ITERATIONS >= 100_000


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% "
        "endfor %}{{ ns.x | length }}",
        "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% "
        "endfor %}{{ ns.x | length }}",
        "{{ 'a'.ljust(500000000) | length }}",
        "{{ '%500000000d' % 1 }}",
    ],
)
def test_templates_that_call_or_grow_without_end_are_stopped(source):
    began = time.process_time()  # other processes on the machine do not count
    with pytest.raises(RequestError, match="template"):
        rendered(source, "x")
    assert time.process_time() - began < 20
