"""aider, the command: a question about a file, and a change that it is asked for, without a
terminal. The model is too small to write the change in aider's form, which then asks again."""

from __future__ import annotations

from pathlib import Path

from check import BASE, KEY, MODEL, call, command, main, scratch


def aider(*arguments: str) -> str:
    """Runs aider in a folder with one file; returns what it writes."""
    home = scratch()
    file = Path(home, "hello.py")
    file.write_text('print("hello")\n')
    settings = Path(home, "settings.yml")
    settings.write_text(f"- name: openai/{MODEL}\n  extra_params: {{max_tokens: 48}}\n")
    return command(
        "aider",
        f"--model=openai/{MODEL}",
        f"--openai-api-base={BASE}",
        f"--openai-api-key={KEY}",
        f"--model-settings-file={settings}",
        f"--chat-history-file={home}/history.md",
        f"--input-history-file={home}/input",
        *("--no-git", "--yes-always", "--no-analytics", "--no-check-update", "--map-tokens=0"),
        *("--no-show-model-warnings", "--no-show-release-notes", "--no-suggest-shell-commands"),
        *arguments,
        str(file),
        HOME=home,
        LITELLM_LOCAL_MODEL_COST_MAP="True",
    )


def answered(text: str) -> None:
    assert "Tokens:" in text and "received" in text, text[-300:]
    assert "litellm." not in text, text[-300:]  # its errors, after which aider tries again


@call
def question() -> None:
    answered(aider("--chat-mode=ask", "--message=What does this print?"))


@call
def question_without_a_stream() -> None:
    answered(aider("--chat-mode=ask", "--no-stream", "--message=What does this print?"))


@call
def change() -> None:
    answered(aider("--edit-format=whole", "--message=Print hi instead."))


main("aider-chat")
