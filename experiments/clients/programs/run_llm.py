"""llm, the command: prompts, streams, conversations, schemas and completions, by the file
extra-openai-models.yaml."""

from __future__ import annotations

import json
from pathlib import Path

from check import BASE, MODEL, call, command, main, scratch

HOME = Path(scratch())
QUESTION = "What is the capital of France?"
SHORT = ("-o", "temperature", "0", "-o", "max_tokens", "16")
(HOME / "extra-openai-models.yaml").write_text(
    f"""
- model_id: chat
  model_name: {MODEL}
  api_base: {BASE}
  supports_schema: true
  supports_tools: true
- model_id: text
  model_name: {MODEL}
  api_base: {BASE}
  completion: true
"""
)


def llm(*arguments: str) -> str:
    """The command's output. Errors: AssertionError with what it wrote to standard error."""
    return command("llm", *arguments, LLM_USER_PATH=str(HOME)).strip()


@call
def models_are_listed() -> None:
    assert "chat" in llm("models")


@call
def stream_is_the_same_text() -> None:
    whole = llm("-m", "chat", "--no-stream", QUESTION, *SHORT)
    assert whole and llm("-m", "chat", QUESTION, *SHORT) == whole


@call
def conversation_goes_on() -> None:
    llm("-m", "chat", QUESTION, *SHORT)
    assert llm("-c", "And of Italy?", *SHORT)


@call
def schema() -> None:
    wanted = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    made = llm("-m", "chat", "--schema", json.dumps(wanted), QUESTION, "-o", "max_tokens", "60")
    assert json.loads(made)["city"] in ("Paris", "Rome")


@call
def tools_are_taken() -> None:
    made = llm("-m", "chat", "-T", "llm_version", QUESTION, *SHORT, "--chain-limit", "2")
    assert made is not None


@call
def usage_is_told() -> None:
    llm("-m", "chat", "--no-stream", QUESTION, *SHORT)
    last = json.loads(llm("logs", "--json", "-n", "1"))[0]
    assert last["input_tokens"] > 5 and 0 < last["output_tokens"] <= 16


@call
def completion() -> None:
    assert llm("-m", "text", "Once upon", *SHORT)


main("llm")
