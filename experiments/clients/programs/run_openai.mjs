// The openai package for Node: completions, chats, responses, streams, tools, errors.

import assert from "node:assert/strict";
import { BASE, MODEL, call, main } from "./check.mjs";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const client = new OpenAI({ baseURL: BASE, apiKey: "none", timeout: 150_000 });
const messages = [{ role: "user", content: "What is the capital of France?" }];
const greedy = { model: MODEL, temperature: 0, max_tokens: 16 };
const City = z.object({ city: z.enum(["Paris", "Rome"]) });
const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const tool = { type: "function", function: { name: "get_weather", parameters } };

call("models", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  assert(ids.includes(MODEL));
});

call("completion_stream_is_the_same_text", async () => {
  const ask = { ...greedy, prompt: "The capital of France is" };
  const whole = await client.completions.create(ask);
  let text = "";
  for await (const chunk of await client.completions.create({ ...ask, stream: true })) {
    text += chunk.choices[0].text;
  }
  assert.equal(text, whole.choices[0].text);
});

call("chat_stream_is_the_same_text", async () => {
  const whole = await client.chat.completions.create({ ...greedy, messages });
  const stream = client.chat.completions.stream({
    ...greedy,
    messages,
    stream_options: { include_usage: true },
  });
  const final = await stream.finalChatCompletion();
  assert.equal(final.choices[0].message.content, whole.choices[0].message.content);
  assert.equal(final.usage.completion_tokens, whole.usage.completion_tokens);
});

call("chat_stream_is_aborted", async () => {
  const stream = await client.chat.completions.create({
    ...greedy,
    messages,
    max_tokens: 2000,
    stream: true,
    ignore_eos: true,
  });
  for await (const _ of stream) break;
  assert((await client.chat.completions.create({ ...greedy, messages })).choices.length);
});

call("tools_required", async () => {
  const ask = { ...greedy, max_tokens: 60, messages, tools: [tool], tool_choice: "required" };
  const made = (await client.chat.completions.create(ask)).choices[0];
  assert.equal(made.finish_reason, "tool_calls");
  const whole = made.message.tool_calls[0].function.arguments;
  assert(City.safeParse(JSON.parse(whole)).success);
  const stream = client.chat.completions.stream(ask);
  const final = (await stream.finalChatCompletion()).choices[0];
  assert.equal(final.message.tool_calls[0].function.arguments, whole);
});

call("tools_run_by_the_client", async () => {
  let asked = 0;
  const run = async () => {
    asked += 1;
    return "18 degrees";
  };
  const runner = client.chat.completions.runTools(
    {
      ...greedy,
      max_tokens: 60,
      messages,
      tools: [{ type: "function", function: { ...tool.function, function: run, parse: JSON.parse } }],
      tool_choice: { type: "function", function: { name: "get_weather" } },
    },
    { maxChatCompletions: 2 },
  );
  await runner.done();
  assert(asked >= 1);
});

call("structured_output", async () => {
  const made = await client.chat.completions.parse({
    ...greedy,
    max_tokens: 60,
    messages,
    response_format: zodResponseFormat(City, "city"),
  });
  assert(["Paris", "Rome"].includes(made.choices[0].message.parsed.city));
});

call("errors", async () => {
  const wrong = client.chat.completions.create({ ...greedy, messages, model: "gpt-5" });
  await assert.rejects(wrong, OpenAI.NotFoundError);
  const hot = client.chat.completions.create({ ...greedy, messages, temperature: -1 });
  await assert.rejects(hot, OpenAI.BadRequestError);
});

const response = { model: MODEL, temperature: 0, max_output_tokens: 16 };

call("response_stream_is_the_same_text", async () => {
  const whole = await client.responses.create({ ...response, input: "Hello" });
  const stream = client.responses.stream({ ...response, input: "Hello" });
  const final = await stream.finalResponse();
  assert(whole.output_text);
  assert.equal(final.output_text, whole.output_text);
});

call("response_tools", async () => {
  const made = await client.responses.create({
    ...response,
    max_output_tokens: 60,
    input: "Weather in Paris?",
    tools: [{ type: "function", strict: true, ...tool.function }],
    tool_choice: "required",
  });
  const found = made.output.find((item) => item.type === "function_call");
  assert(City.safeParse(JSON.parse(found.arguments)).success);
});

call("response_structured_output", async () => {
  const made = await client.responses.parse({
    ...response,
    max_output_tokens: 60,
    input: "Which city?",
    text: { format: zodTextFormat(City, "city") },
  });
  assert(["Paris", "Rome"].includes(made.output_parsed.city));
});

await main("openai", "zod");
