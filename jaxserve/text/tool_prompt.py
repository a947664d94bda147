"""Describes tools to models whose chat templates have no place for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TOLD = """\
You may call functions to answer. These are described in JSON between <tools></tools>:
<tools>
{tools}
</tools>
To call one, write its name and arguments in JSON between <tool_call></tool_call>:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""


def with_tools_told(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """Returns messages of which a system message describes the tools, in the format of Hermes
    models, with calls and their results written as plain text."""
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    told = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]


def _as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a message with its calls, or its result of one, written as plain text."""
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = [{"name": f["name"], "arguments": f["arguments"]} for f in functions]
    written = [f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls]
    content = "\n".join(filter(None, [message["content"], *written]))
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    return {"role": message["role"], "content": content}
