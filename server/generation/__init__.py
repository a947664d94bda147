"""Parts that the HTTP protocols of the users' port share, below `openai` and `anthropic`.

`fields` and `bodies` check what callers send and make `GenerateCall`s of it; `chat` has the body
that every protocol's chats become, `chat_parts` reads what the model answers; `responding` sends
answers, whole or as server-sent events; `embedding` embeds texts.
"""
