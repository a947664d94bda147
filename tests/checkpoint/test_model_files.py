"""Facts about a model that may stand in several files: special and added tokens, chat templates,
ends of completions, recommended sampling."""

import json
import logging

import pytest

from jaxserve.checkpoint.generation_config import file_fields, sampling_defaults, usable_sampling
from jaxserve.checkpoint.gguf_config import from_gguf
from jaxserve.checkpoint.model_config import from_hf, to_hf
from jaxserve.checkpoint.model_files import notes, read_json, read_object, read_text
from jaxserve.checkpoint.model_paths import CheckpointError
from jaxserve.checkpoint.tokenizer_files import TokenizerFacts, eos_id, turn_ends
from jaxserve.checkpoint.zoo import MODELS
from jaxserve.settings.schema import ConfigError, ModelSource

BOM = b"\xef\xbb\xbf"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:11\nsize 9\n"
CONFIG = to_hf(MODELS["tiny"])


def write(folder, **files):
    """Writes files: JSON, or a template's text; `__` in a name stands for a point."""
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def facts(folder, **files):
    return TokenizerFacts.of_folder(write(folder, **files))


def token(text, **flags):
    return {"content": text, "lstrip": False, "rstrip": False, "normalized": False, **flags}


def test_a_byte_order_mark_is_skipped_and_a_pointer_is_named(tmp_path):
    path = tmp_path / "x.json"
    path.write_bytes(BOM + b'{"a": 1}')
    assert read_json(path) == {"a": 1} and read_text(path) == '{"a": 1}'
    path.write_text(POINTER)
    with pytest.raises(CheckpointError, match=r"x\.json: is a git-lfs pointer .*`git lfs pull`"):
        read_json(path)
    path.write_bytes(b"\xff\xfe{\0}\0")
    with pytest.raises(CheckpointError, match=r"x\.json: not UTF-8"):
        read_json(path)
    assert read_object(tmp_path / "missing.json") == {}


def test_special_tokens_are_the_union_of_two_files(tmp_path):
    only_map = facts(
        tmp_path,
        special_tokens_map__json={"bos_token": token("<b>"), "eos_token": "<e>"},
        tokenizer_config__json={"eos_token": "<other>", "pad_token": None, "add_bos_token": True},
    )
    assert only_map.specials == {"bos_token": "<b>", "eos_token": "<e>"}
    with_decoder = facts(
        tmp_path, tokenizer_config__json={"eos_token": "<other>", "added_tokens_decoder": {}}
    )
    assert with_decoder.specials == {"bos_token": "<b>", "eos_token": "<other>"}


def test_special_tokens_without_a_standard_name_are_known(tmp_path):
    read = facts(
        tmp_path,
        tokenizer_config__json={
            "image_token": "<img>",
            "extra_special_tokens": {"audio_token": "<snd>"},
            "additional_special_tokens": ["<x>", token("<y>"), 3],
        },
    )
    assert read.specials == {"image_token": "<img>", "audio_token": "<snd>"}
    assert read.extra == ("<x>", "<y>")


def test_added_tokens_stand_in_the_config_or_in_the_older_file(tmp_path):
    older = facts(
        tmp_path,
        added_tokens__json={"<t>": 7, "<e>": 8, "<none>": None},
        tokenizer_config__json={"eos_token": "<e>"},
    )
    assert {id: (t.text, t.special) for id, t in older.added.items()} == {
        7: ("<t>", False),
        8: ("<e>", True),
    }
    decoder = {"9": token("<n>", special=True, lstrip=True), "x": token("<?>"), "10": "<?>"}
    newer = facts(tmp_path, tokenizer_config__json={"added_tokens_decoder": decoder})
    assert [*newer.added] == [9] and newer.added[9].special and newer.added[9].flags["lstrip"]


LISTED = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "list tools"}]


@pytest.mark.parametrize(
    "files, templates",
    [
        ({}, {}),
        ({"chat_template__json": {"chat_template": "old"}}, {"default": "old"}),
        ({"tokenizer_config__json": {"chat_template": "one"}}, {"default": "one"}),
        (
            {"tokenizer_config__json": {"chat_template": [*LISTED, {"name": "rag"}, 7]}},
            {"default": "list", "tool_use": "list tools"},
        ),
        (
            {"tokenizer_config__json": {"chat_template": LISTED}, "chat_template__jinja": "file"},
            {"default": "file"},
        ),
    ],
)
def test_templates_come_from_the_newest_place(files, templates, tmp_path):
    assert facts(tmp_path, **files).templates == templates


def test_templates_in_a_folder_have_its_files_names(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    write(tmp_path / "additional_chat_templates", tool_use__jinja="tools", rag__jinja="rag")
    (tmp_path / "additional_chat_templates" / "notes.txt").write_text("no template")
    config = {"chat_template": LISTED}
    named = facts(tmp_path, tokenizer_config__json=config).templates
    assert named == {"default": "list", "tool_use": "tools", "rag": "rag"}
    (tmp_path / "chat_template.jinja").write_bytes(BOM + b"file")
    assert facts(tmp_path).templates == {**named, "default": "file"}


def test_a_gguf_has_special_tokens_by_id_and_templates_by_name():
    fields = {
        "tokenizer.ggml.tokens": ["<u>", "<b>", "<e>"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2**32 - 1,
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_templates": ["tool_use"],
    }
    read = TokenizerFacts.of_gguf(fields)
    assert read.specials == {"bos_token": "<b>", "eos_token": "<e>"}
    assert read.templates == {"default": "plain", "tool_use": "tools"}


@pytest.mark.parametrize(
    "files, id",
    [
        ({}, None),
        ({"tokenizer_config__json": {"eos_token": "<gone>"}}, None),
        ({"tokenizer_config__json": {"eos_token": token("<e>")}}, 5),
        ({"tokenizer_config__json": {"eos_token": "</s>"}}, 2),
        ({"special_tokens_map__json": {"eos_token": "<e>"}}, 5),
        (
            {
                "tokenizer_config__json": {
                    "eos_token": "<n>",
                    "added_tokens_decoder": {"9": token("<n>")},
                }
            },
            9,
        ),
    ],
)
def test_the_end_of_the_tokenizer_is_found_by_its_text(files, id, tmp_path):
    library = {"added_tokens": [{"id": 5, "content": "<e>"}], "model": {"vocab": {"</s>": 2}}}
    assert eos_id(write(tmp_path, tokenizer__json=library, **files)) == id


def test_a_completion_ends_where_any_of_the_files_says():
    config = CONFIG | {"eos_token_id": 4}
    assert from_hf(config, {"eos_token_id": [7, 4]}, tokenizer_eos=9).eos_ids == (7, 4, 9)
    assert from_hf(config, {"stop_token_ids": [8]}).eos_ids == (8, 4)
    assert from_hf(config | {"eos_token_id": None}, {}, tokenizer_eos=9).eos_ids == (9,)
    assert from_hf(config | {"eos_token_id": []}).eos_ids == ()
    nested = {"architectures": CONFIG["architectures"], "text_config": config, "eos_token_id": [5]}
    assert from_hf(nested).eos_ids == (5, 4)


@pytest.mark.parametrize("wrong", [512, -1, "</s>", 2.0, True, [None, 600]])
def test_ends_that_the_model_does_not_have_are_left_out_and_said(wrong, caplog):
    notes.forget()
    config = CONFIG | {"eos_token_id": 4, "bos_token_id": 10**6}
    for _ in range(2):
        model = from_hf(config, {"eos_token_id": wrong})
        assert (model.eos_ids, model.bos_id) == ((4,), None)
    assert caplog.text.count("generation_config.json: eos_token_id: left out") == 1
    assert caplog.text.count("config.json: bos_token_id: left out '1000000'") == 1


def test_ends_of_a_gguf_beyond_its_vocabulary_are_left_out():
    fields = {
        "general.architecture": "llama",
        **{
            f"llama.{key}": value
            for key, value in {
                "attention.head_count": 4,
                "attention.head_count_kv": 2,
                "embedding_length": 64,
                "feed_forward_length": 128,
                "block_count": 2,
                "context_length": 64,
                "vocab_size": 300,
            }.items()
        },
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.eom_token_id": 2**32 - 1,
        "general.sampling.temp": 0.7,
        "general.sampling.penalty_repeat": 1.1,
    }
    model = from_gguf(fields, ())
    assert model.eos_ids == (2, 7)
    assert dict(model.sampling) == {"temperature": 0.7, "repetition_penalty": 1.1}


def test_a_gguf_ends_at_the_end_of_a_turn_that_its_template_writes():
    fields = {
        "tokenizer.ggml.tokens": ["<b>", "<|eot_id|>", "<|im_end|>", "<end_of_turn>"],
        "tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>",
    }
    assert turn_ends(fields) == [2]
    assert turn_ends({**fields, "tokenizer.chat_template": ""}) == turn_ends({}) == []


GENERATION = {
    "do_sample": False,
    "max_length": 20,
    "temperature": 0.6,
    "top_k": 20,
    "top_p": None,
    "min_p": 0.05,
    "max_new_tokens": 99,
}
RECOMMENDED = (("temperature", 0.6), ("top_k", 20), ("min_p", 0.05), ("max_tokens", 99))


def test_recommended_sampling_has_our_names():
    assert usable_sampling("x", GENERATION) == RECOMMENDED
    assert from_hf(CONFIG, GENERATION).sampling == RECOMMENDED
    assert usable_sampling("x", file_fields(RECOMMENDED)) == RECOMMENDED


def test_recommended_values_out_of_range_are_left_out_and_said(caplog):
    fields = {"temperature": "0.7", "top_p": 1.7, "top_k": True, "repetition_penalty": 1.2}
    with caplog.at_level(logging.WARNING):
        assert dict(usable_sampling("of this test", fields)) == {"repetition_penalty": 1.2}
    assert all(
        f"of this test: left out of the sampling defaults: {name}" in caplog.text
        for name in ("temperature", "top_p", "top_k")
    )


def test_the_setting_says_where_sampling_defaults_stand(tmp_path):
    write(tmp_path, generation_config__json={"top_k": 3})

    def chosen(value):
        return sampling_defaults(ModelSource(generation_config=value), RECOMMENDED)

    assert chosen("auto") == dict(RECOMMENDED)
    assert chosen("none") == chosen("vllm") == {}
    assert chosen(str(tmp_path)) == {"top_k": 3}
    with pytest.raises(ConfigError, match="generation_config: '/no/such' is neither auto, none"):
        chosen("/no/such")
