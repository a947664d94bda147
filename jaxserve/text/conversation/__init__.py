"""Makes a conversation, as callers of any protocol send it, one that a model's template takes.

`messages` reads what came, repairs it where that is needed, and gives every message one form;
`arguments` reads the arguments of calls. `remedies` finds out what a template does not take, and
changes conversations accordingly.
"""

from jaxserve.text.conversation.messages import Message, plain_messages
from jaxserve.text.conversation.remedies import Remedies

__all__ = ["Message", "Remedies", "plain_messages"]
