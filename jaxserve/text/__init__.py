"""Text to token ids and back: `Tokenizer`. `vocabulary` builds one from a GGUF file,
`conversation` fits chats to the model's template, and `chat_template` renders them. `detokenizer`
makes text of ids.

The Rust library `tokenizers` encodes. Decoding is a table from ids to bytes, so that a stream of
tokens can be turned into text one token at a time, exactly as all of them at once.
"""

from jaxserve.text.detokenizer import Detokenizer
from jaxserve.text.tokenizer import Tokenizer

__all__ = ["Detokenizer", "Tokenizer"]
