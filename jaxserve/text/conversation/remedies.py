"""Finds out by trying what a chat template does not take, and changes conversations accordingly.

Templates differ: some raise an exception for a second system message or for roles that do not
alternate, others leave out what they do not know without a word. A remedy is a change of
conversations after which such a template shows everything. Each comes with probes, short
conversations: a template needs the remedy if it does not show all words of the first of them, and
takes it if it then shows all words of each.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable

from jaxserve.text.conversation import changes
from jaxserve.text.conversation.changes import Messages, user
from jaxserve.text.conversation.messages import REASONING, Message

Render = Callable[[Messages], str | None]  # None: the template fails

NAMED = r"""\.{0}\b|['"]{0}['"]"""  # in a template: an attribute, or a key
WORD = re.compile(r"qz\w+")  # in a probe: what a template must show
PYTHON_OBJECT = re.compile(r"(\{|(text|thinking)': )'qz")  # written as if it were a text


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Remedy:
    """A change of conversations. does: what it does, for the log. probes: see above. unless: a word
    in the source of templates that do not need it; '' is none."""

    does: str
    apply: Callable[[Messages], Iterable[Message]]
    probes: tuple[Messages, ...]
    unless: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Remedies:
    """Changes that one template needs. reasoning: names that it has for earlier reasoning."""

    needed: tuple[Remedy, ...] = ()
    reasoning: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: str, render: Render) -> Remedies:
        """Tries a template. render: makes the text of a conversation, without any remedy."""
        reasoning = tuple(name for name in REASONING if re.search(NAMED.format(name), source))
        found = cls((), reasoning)
        if not any(_shows(render, form, _ASK) for form in (found, *map(found.with_one, _FORMS))):
            return found  # it shows nothing of what it is given, or fails
        for remedy in (*_FORMS, *_CHANGES):
            more = found.with_one(remedy)
            missed = bool(remedy.unless) and remedy.unless not in source
            lost = missed or not _shows(render, found, remedy.probes[0])
            if lost and all(_shows(render, more, probe) for probe in remedy.probes):
                found = more
        return found

    def with_one(self, remedy: Remedy) -> Remedies:
        """Adds a remedy, in the order in which they are applied."""
        needed = {*self.needed, remedy}
        order = [one for one in (*_CHANGES, *_FORMS) if one in needed]
        return dataclasses.replace(self, needed=tuple(order))

    def apply(self, messages: Messages) -> list[Message]:
        """Returns a conversation as the template takes it."""
        fit: Messages = [self._with_reasoning(message) for message in messages]
        for remedy in self.needed:
            fit = list(remedy.apply(fit))
        return list(fit)

    def _with_reasoning(self, message: Message) -> Message:
        """A message with its reasoning under the names that the template has for it."""
        if "reasoning_content" not in message:
            return message
        rest = dict(message)
        text = rest.pop("reasoning_content")
        return rest | dict.fromkeys(self.reasoning, text)


def _shows(render: Render, remedies: Remedies, probe: Messages) -> bool:
    """Returns True if a template shows all words of a probe."""
    text = render(remedies.apply(probe))
    if text is None or PYTHON_OBJECT.search(text):
        return False
    return all(word in text for word in WORD.findall(json.dumps(probe)))


def _system(content: str) -> Message:
    return {"role": "system", "content": content}


def _answer(content: str, *calls: Message, **rest: str) -> Message:
    message = {"role": "assistant", "content": content, **rest}
    return {**message, "tool_calls": list(calls)} if calls else message


def _call(name: str, id: str, **arguments: str) -> Message:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(id: str, content: str) -> Message:
    return {"role": "tool", "name": "f", "tool_call_id": id, "content": content}


_ID = "a1b2c3d4e"
_OTHER_ID = "f6a7b8c9d"
_LONG = "call_0123456789abcdef"
_ASK = (user("qzask"),)
_TALK = (*_ASK, _answer("qzanswer"), user("qzmore"))
_SYSTEMS = (_system("qzfirst"), _system("qzsecond"), *_TALK[:2], _system("qzlate"), _TALK[2])
_CALLED = (*_ASK, _answer("", _call("qzname", _ID)), _result(_ID, "qzgiven"))
_TOLD = (*_ASK, _answer("qztext", _call("qzname", _ID)), _CALLED[2])

_CHANGES = (  # in the order in which they are applied
    Remedy(
        "messages of a developer are a system's",
        changes.developer_as_system,
        (({"role": "developer", "content": "qzrule"}, user("ask")),),
        unless="developer",
    ),
    Remedy("all texts of a system come first, as one", changes.one_system, (_SYSTEMS,)),
    Remedy("texts of a system are the user's", changes.system_in_user, (_SYSTEMS,)),
    Remedy(
        "texts of a system are the user's, as they are lost beside calls",
        changes.system_in_user,
        ((_system("qzrule"), *_CALLED), _SYSTEMS),
    ),
    Remedy(
        "every call has a message of its own",
        changes.one_call_each,
        (
            (
                *_ASK,
                _answer("", _call("qzname", _ID), _call("qzother", _OTHER_ID)),
                _result(_ID, "qzgiven"),
                _result(_OTHER_ID, "qztoo"),
            ),
        ),
    ),
    Remedy(
        "text before a call is a message of its own",
        changes.text_before_calls,
        (_TOLD, (*_TOLD, *_TALK[1:])),
    ),
    Remedy(
        "text before a call is a message of its own, which an empty one of a user follows",
        changes.text_and_user_before_calls,
        (_TOLD, (*_TOLD, *_TALK[1:])),
    ),
    Remedy(
        f"ids of calls have {changes.ID_CHARS} letters and digits",
        changes.short_ids,
        (
            (*_ASK, _answer("", _call("qzname", "c1")), _result("c1", "qzgiven")),
            (*_ASK, _answer("", _call("qzname", _LONG)), _result(_LONG, "qzgiven")),
        ),
    ),
    Remedy(
        "reasoning before a call is in its content",
        changes.reasoning_in_content,
        (
            (
                *_ASK,
                _answer("text", _call("qzname", _ID), reasoning_content="thought"),
                _result(_ID, "qzgiven"),
            ),
        ),
    ),
    Remedy(
        "results without their calls are the user's",
        changes.stray_results_as_text,
        ((*_ASK, _result(_ID, "qzgiven"), user("qzmore")),),
    ),
    Remedy("calls are text", changes.calls_as_text, (_CALLED,)),
    Remedy("results of calls are the user's", changes.results_as_text, (_CALLED,)),
    Remedy("calls are text, their results the user's", changes.tools_as_text, (_CALLED,)),
    Remedy(
        "messages of one role that follow each other are one",
        changes.alternating,
        ((*_ASK, user("qzmore"), _answer("qzanswer"), _answer("qztoo"), user("qzend")),),
    ),
    Remedy(
        "an empty message of a user comes first",
        changes.user_first,
        ((_answer("qzanswer"), *_ASK),),
    ),
    Remedy(
        "a conversation without a user has an empty message of one",
        changes.some_user,
        ((_system("qzrule"),), (_system("qzrule"), *_CALLED[1:])),
    ),
    Remedy(
        "an answer without text is a blank",
        changes.blank_answers,
        ((*_ASK, _answer(""), user("qzmore")),),
    ),
    Remedy(
        "a call is answered before the user goes on",
        changes.answered_before_user,
        ((*_CALLED, user("qzmore")), (*_CALLED[:2], user("qzmore"))),
    ),
)
_FORMS = (  # applied last, and tried first, as nothing is shown without them
    Remedy(
        "reasoning is a part of the content",
        changes.reasoning_as_part,
        ((*_ASK, _answer("qzanswer", reasoning_content="qzthought")),),
    ),
    Remedy("contents are lists of parts", changes.parts, (_TALK,)),
    Remedy("the content of a message with calls is null", changes.null_beside_calls, (_CALLED,)),
    Remedy(
        "arguments are a text",
        changes.arguments_as_text,
        ((*_ASK, _answer("", _call("qzname", _ID, qzkey="value")), _CALLED[2]),),
    ),
    Remedy(
        "the content of a message with calls is null, and arguments are a text",
        changes.null_beside_text_arguments,
        (_CALLED,),
    ),
)
