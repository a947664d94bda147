"""/v1/responses: the newer of the OpenAI protocol's ways to chat, which agents use.

A body becomes that of a chat (`request`), and what comes of it is written as output items:
messages, reasoning and calls of tools (`writer`). A response is stored only where its request asks
for that with `store=true`, within bounds (`stored`); others bring the whole conversation each time.
Tools that a server would run itself (search, files, computers) are refused.
"""
