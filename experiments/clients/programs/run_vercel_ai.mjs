// The AI SDK of Vercel: @ai-sdk/openai, by default over responses, and @ai-sdk/openai-compatible.

import assert from "node:assert/strict";
import { BASE, MODEL, call, main } from "./check.mjs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: BASE, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "jaxserve",
  baseURL: BASE,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const models = {
  responses: openai(MODEL),
  chat: openai.chat(MODEL),
  compatible: compatible(MODEL),
};
const prompt = "What is the capital of France?";
const short = { temperature: 0, maxOutputTokens: 16, maxRetries: 0 };
const longer = { ...short, maxOutputTokens: 60 };
const City = z.object({ city: z.enum(["Paris", "Rome"]) });
const get_weather = tool({
  description: "The weather",
  inputSchema: City,
  execute: async ({ city }) => `18 degrees in ${city}`,
});

async function read(stream) {
  let text = "";
  for await (const part of stream.textStream) text += part;
  return text;
}

for (const [name, model] of Object.entries(models)) {
  call(`${name}_stream_is_the_same_text`, async () => {
    const whole = await generateText({ ...short, model, prompt });
    assert(whole.text);
    assert(whole.usage.outputTokens > 0);
    const stream = streamText({ ...short, model, prompt });
    assert.equal(await read(stream), whole.text);
    assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  });

  call(`${name}_structured_output`, async () => {
    const output = Output.object({ schema: City });
    const made = await generateText({ ...longer, model, prompt, output });
    assert(City.safeParse(made.output).success);
    const stream = streamText({ ...longer, model, prompt, output });
    await read(stream);
    assert.deepEqual(await stream.output, made.output);
  });

  call(`${name}_tools_in_two_steps`, async () => {
    const made = await generateText({
      ...longer,
      model,
      prompt,
      tools: { get_weather },
      toolChoice: "required",
      stopWhen: stepCountIs(2),
    });
    assert.equal(made.steps.length, 2);
    assert(["Paris", "Rome"].includes(made.steps[0].toolCalls[0].input.city));
    assert(made.steps[0].toolResults[0].output.startsWith("18 degrees"));
  });

  call(`${name}_tools_streamed`, async () => {
    const toolChoice = { type: "tool", toolName: "get_weather" };
    const stream = streamText({ ...longer, model, prompt, tools: { get_weather }, toolChoice });
    await read(stream);
    assert(["Paris", "Rome"].includes((await stream.toolCalls)[0].input.city));
  });

  call(`${name}_system_and_history`, async () => {
    const messages = [
      { role: "user", content: [{ type: "text", text: "I am Ann." }] },
      { role: "assistant", content: "Hello Ann." },
      { role: "user", content: "Who am I?" },
    ];
    const made = await generateText({ ...short, model, system: "Be brief.", messages });
    assert(made.text);
  });
}

call("completion_models", async () => {
  for (const model of [openai.completion(MODEL), compatible.completionModel(MODEL)]) {
    const whole = await generateText({ ...short, model, prompt });
    assert.equal(await read(streamText({ ...short, model, prompt })), whole.text);
  }
});

call("reasoning_effort_and_other_options", async () => {
  const options = { reasoningEffort: "low", user: "me" };
  for (const model of [models.responses, models.chat, models.compatible]) {
    const providerOptions = { openai: options, jaxserve: options };
    assert((await generateText({ ...short, model, prompt, providerOptions })).text);
  }
});

call("stops_and_penalties", async () => {
  const ask = { ...short, model: models.compatible, prompt, seed: 3, frequencyPenalty: 0.5 };
  assert((await generateText({ ...ask, presencePenalty: 0.5, stopSequences: ["zzz"] })).text);
});

await main("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible");
