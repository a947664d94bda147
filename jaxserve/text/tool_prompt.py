"""Describes tools to models whose chat templates have no place for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.text.conversation.changes import FIRST_ROLES, tools_as_text
from jaxserve.text.conversation.messages import Message

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
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """Returns messages of which a system message describes the tools, in the format of Hermes
    models, with calls and their results written as plain text."""
    plain = list(tools_as_text(messages))
    if not tools:
        return plain
    told = _TOLD.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain[0]["role"] in FIRST_ROLES:
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{told}"}, *plain[1:]]
    return [{"role": "system", "content": told}, *plain]
