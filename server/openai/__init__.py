"""The OpenAI protocol over HTTP: routes, and writers of the answers to chats, completions,
embeddings and responses."""
