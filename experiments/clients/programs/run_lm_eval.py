"""lm-eval: log-likelihoods and generated texts, with a task of three documents; its requests as
texts and as token ids, with its tokenizer and with the server's."""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from pathlib import Path
from typing import Any

from check import BASE, MODEL, TOKENIZER, call, main

os.environ["HF_HUB_OFFLINE"] = "1"

import lm_eval
from lm_eval.tasks import TaskManager

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid"}
DOCUMENTS = [
    {"country": country, "choices": list(CAPITALS.values()), "answer": number}
    for number, country in enumerate(CAPITALS)
]
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "The capital of {{country}} is",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    },
    "texts": {
        "output_type": "generate_until",
        "doc_to_text": "The capital of {{country}} is",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "The capital of {{country}} is {{choices[answer]}}.",
        "metric_list": [{"metric": "word_perplexity"}],
    },
}
OWN_TOKENIZER = {"tokenizer_backend": "huggingface", "tokenizer": TOKENIZER}


@functools.cache
def tasks() -> TaskManager:
    """The tasks, in files as lm-eval reads them."""
    folder = Path(tempfile.mkdtemp())
    documents = folder / "documents.jsonl"
    documents.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(documents)}},
        "test_split": "test",
    }
    for name, task in TASKS.items():  # JSON is YAML
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}))
    return TaskManager(include_path=str(folder), include_defaults=False)


def responses(task: str, kind: str = "local-completions", **settings: Any) -> list[Any]:
    """Runs a task; returns the response to each of its requests, in order."""
    route = "completions" if kind == "local-completions" else "chat/completions"
    made = lm_eval.simple_evaluate(
        model=kind,
        model_args={"base_url": f"{BASE}/{route}", "model": MODEL, "max_retries": 1, **settings},
        tasks=[task],
        task_manager=tasks(),
        apply_chat_template="chat" in kind,
        log_samples=True,
        bootstrap_iters=0,
    )
    return [sample["resps"] for sample in made["samples"][task]]


def texts_of(found: list[Any]) -> list[str]:
    return [text for ((text,),) in found]


@call
def choices_with_the_servers_tokenizer() -> None:
    found = responses("choices")
    for number, document in enumerate(found):
        values = [value for ((value, _),) in document]
        assert max(values) == values[number] < 0


@call
def choices_are_the_same_with_its_own_tokenizer() -> None:
    assert responses("choices", **OWN_TOKENIZER) == responses("choices")


@call
def choices_are_the_same_as_texts() -> None:
    assert responses("choices", tokenized_requests=False) == responses("choices")


@call
def choices_are_the_same_in_batches_and_at_once() -> None:
    found = responses("choices")
    for more in ({"batch_size": 4}, {"num_concurrent": 3}):
        for (wanted, _), (value, _) in zip(_flat(found), _flat(responses("choices", **more))):
            assert math.isclose(wanted, value, abs_tol=1e-3)


def _flat(found: list[Any]) -> list[Any]:
    return [answer for document in found for (answer,) in document]


@call
def rolling_log_likelihoods() -> None:
    found = responses("rolling")
    assert all(value < 0 for ((value,),) in found)
    assert responses("rolling", **OWN_TOKENIZER) == found


@call
def texts() -> None:
    found = texts_of(responses("texts"))
    assert len(found) == 3 and all(found) and not any("\n" in text for text in found)
    assert texts_of(responses("texts", tokenized_requests=False)) == found
    assert texts_of(responses("texts", num_concurrent=3)) == found


@call
def texts_of_chats() -> None:
    found = texts_of(responses("texts", "local-chat-completions"))
    assert len(found) == 3 and not any("\n" in text for text in found)


main("lm-eval")
