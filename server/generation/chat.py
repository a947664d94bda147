"""Chats: the body of /v1/chat/completions, which other protocols' bodies are turned into, and the
call that it asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from jaxserve.api.errors import RequestError
from jaxserve.api.sampling import MAX_INT32, RANGES
from jaxserve.server.frontend import Frontend
from jaxserve.server.generate_call import GenerateCall
from jaxserve.server.generation.bodies import GenerateRequest
from jaxserve.server.generation.fields import FirstFault, Integer, Messages, OnlyValues, OpenModel
from jaxserve.server.generation.tools import (
    FUNCTION,
    MAX_TOOLS,
    Choice,
    ChosenTools,
    Function,
    NamedFunction,
    NamedTool,
    Tool,
    repeated,
)
from jaxserve.server.http_app import first_fault
from jaxserve.server.json_body import JsonObject
from jaxserve.server.kv_tickets import KvTransfer
from jaxserve.server.prompts import Chat
from jaxserve.text.structured_output import Guided
from jaxserve.text.structured_output.tools import calls_guide, forced_call

UNLIMITED_TOKENS = MAX_INT32  # max_tokens of a chat that sets none: up to the model's limit
_OWN_NAMES = {  # fields with the limits of a sampling parameter
    "top_logprobs": "logprobs",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
}


class ChatRequest(GenerateRequest):
    messages: Messages
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    tools: Annotated[list[Tool], FirstFault()] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[Function], FirstFault()] | None = Field(
        None, description="what was before tools; has no effect beside them", max_length=MAX_TOOLS
    )
    function_call: Literal["none", "auto"] | NamedFunction | None = Field(
        None, description="what was before tool_choice"
    )
    add_generation_prompt: bool | None = Field(
        None, description="as in vLLM: whether the prompt ends with the beginning of an answer"
    )
    continue_final_message: bool | None = Field(
        None, description="as in vLLM: the answer continues the last message"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables for the model's chat template"
    )
    # what would be answered wrongly if it had no effect
    chat_template: Annotated[Any, OnlyValues("", None, why="is not taken from requests")] = None
    modalities: Annotated[Any, OnlyValues(["text"], [], None, why="only text is generated")] = None
    reasoning_effort: str | None = Field(
        None, description="a variable for the model's chat template", max_length=32
    )

    include_reasoning: bool | None = Field(None, description="whether answers have reasoning")

    @classmethod
    def of(cls, body: OpenModel, **fields: Any) -> ChatRequest:
        """Returns the chat that another protocol's body asks for: its fields of equal names, and
        these instead of others. Errors: RequestError."""
        same = type(body).model_fields.keys() & cls.model_fields.keys()
        values = {name: getattr(body, name) for name in same}
        try:
            return cls.model_validate({**values, **fields})
        except ValidationError as error:
            raise first_fault(error.errors()[0]) from None

    @property
    def left_out(self) -> Iterable[str]:
        return repeated(tool.function.name for tool in self.tools or () if tool.function)

    @property
    def chosen_tools(self) -> ChosenTools:
        if not self.has_functions:
            return ChosenTools(self.tools or (), self.tool_choice)
        tools = [Tool(type=FUNCTION, function=function) for function in self.functions or ()]
        if isinstance(self.function_call, NamedFunction):
            return ChosenTools(tools, NamedTool(type=FUNCTION, function=self.function_call))
        return ChosenTools(tools, self.function_call)

    @property
    def has_functions(self) -> bool:
        """True if functions are described, and calls written, as before `tools` existed."""
        return bool(self.functions) and not self.tools

    @property
    def has_parallel_calls(self) -> bool:
        return self.parallel_tool_calls is not False and not self.has_functions

    def check_own_names(self) -> None:
        """Checks values that sampling parameters have by other names, or that one of another name
        replaces. Errors: RequestError."""
        for name, limits in _OWN_NAMES.items():
            if (value := getattr(self, name)) is not None:
                RANGES[limits].check(name, value)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the model's chat template."""
        variables = self.chat_template_kwargs or {}
        if self.reasoning_effort is None:
            return variables
        return {"reasoning_effort": self.reasoning_effort, **variables}


def chat_call(frontend: Frontend, body: ChatRequest, headers: Mapping[str, str]) -> GenerateCall:
    """Returns the call that a chat asks for. Errors: RequestError."""
    chosen = body.chosen_tools
    chosen.check()
    transfer = KvTransfer.read(body.kv_transfer_params)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs", "needs logprobs=true")
    body.check_own_names()
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    sampling = body.sampling(
        frontend.info,
        UNLIMITED_TOKENS,
        max_tokens=limit,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    tools = [function.as_message() for function in chosen.functions]
    fields = body.call_fields(headers)
    if chosen.required:
        # a response format is for texts, and a forced call has none
        field = fields["guided_field"]
        if fields["guided"] is not None and not field.startswith("response_format"):
            raise RequestError("tool_choice", f"cannot force a call beside {field}")
        fields |= {"guided": forced_call(tools, chosen.named), "guided_field": "tools"}
    if fields["guided"] is None:
        fields["keep_special"] |= bool(tools) or frontend.chat_formats.keeps_special
        if (strict := _strict_calls(frontend, tools)) is not None:
            fields |= {"guided": strict, "guided_field": "tools"}
    prompt = Chat(
        body.messages,
        tools,
        body.template_variables,
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=body.continue_final_message or False,
    )
    return GenerateCall(prompt, sampling, kv_transfer=transfer, **fields)


def _strict_calls(frontend: Frontend, tools: Sequence[JsonObject]) -> Guided | None:
    """Returns the constraint by which calls that the model chooses to make match the schemas of
    strict tools; None if no tool is strict, or if the form of the model's calls allows none."""
    form = frontend.chat_formats.tools
    tokenizer = frontend.tokenizer
    if form is None or tokenizer is None or form.guide is None:
        return None
    if not any(tool["function"].get("strict") for tool in tools):
        return None
    begin, end = form.guide
    return calls_guide(tools, begin, end, tokenizer.is_token(begin))
