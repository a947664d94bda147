// Coding agents, headless: Codex over responses, Claude Code over messages, opencode over chats.
// The model is of no use to them; what counts is that every request is taken and that
// the agent comes to its end by what the model says.

import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import fs from "node:fs";
import os from "node:os";
import path from "node:path";
import { BASE, MODEL, URL_, call, main } from "./check.mjs";

const SECONDS = 600; // their prompts have thousands of tokens
const TASK = "Say hello.";
const CODEX = `
model = "${MODEL}"
model_provider = "jaxserve"
[model_providers.jaxserve]
name = "jaxserve"
base_url = "${BASE}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`;
const CLAUDE = {
  ANTHROPIC_BASE_URL: URL_,
  ANTHROPIC_API_KEY: "none",
  ANTHROPIC_MODEL: MODEL,
  ANTHROPIC_SMALL_FAST_MODEL: MODEL,
  CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
  CLAUDE_CODE_MAX_OUTPUT_TOKENS: "64",
};
const OPENCODE = {
  autoupdate: false,
  share: "disabled",
  provider: {
    jaxserve: {
      npm: "@ai-sdk/openai-compatible",
      options: { baseURL: BASE, apiKey: "none" },
      models: { [MODEL]: { limit: { context: 8192, output: 64 } } },
    },
  },
  model: `jaxserve/${MODEL}`,
  small_model: `jaxserve/${MODEL}`,
};

function agent(name, args, environment, files = {}) {
  const home = fs.mkdtempSync(path.join(os.tmpdir(), "agent-"));
  for (const [file, text] of Object.entries(files)) fs.writeFileSync(path.join(home, file), text);
  const program = path.resolve("node_modules/.bin", name);
  const done = spawnSync(program, args, {
    cwd: home,
    env: { PATH: process.env.PATH, HOME: home, ...environment(home) },
    input: "",
    encoding: "utf8",
    timeout: SECONDS * 1000,
  });
  fs.rmSync(home, { recursive: true });
  console.log(done.stdout, done.stderr);
  return { code: done.status, said: done.stdout, why: done.stderr.slice(-300) };
}

function claude(...args) {
  const ask = ["-p", TASK, "--output-format", "json", ...args];
  const { said, why } = agent("claude", ask, () => CLAUDE);
  assert(said, why);
  return JSON.parse(said);
}

call("codex_answers", async () => {
  const ask = ["exec", "--skip-git-repo-check", "--json", TASK];
  const files = { "config.toml": CODEX };
  const { said, why } = agent("codex", ask, (home) => ({ CODEX_HOME: home }), files);
  const end = JSON.parse(said.trim().split("\n").at(-1));
  // a model that does not end its answer fills the context
  assert(end.type === "turn.completed" || /ran out of room/.test(end.error.message), why);
});

call("claude_code_answers", async () => {
  const made = claude("--system-prompt", "Be brief.", "--tools", "Read");
  assert(!made.is_error || /output token maximum/.test(made.result), made.result);
  assert(made.usage.output_tokens > 0);
});

call("claude_code_knows_a_full_context", async () => {
  const made = claude(); // its own prompt and tools have 20,000 tokens
  assert.match(made.result, /^Prompt is too long/);
});

call("opencode_answers", async () => {
  const config = (home) => ({ OPENCODE_CONFIG: path.join(home, "config.json") });
  const files = { "config.json": JSON.stringify(OPENCODE) };
  const ask = ["run", "--format", "json", TASK];
  const { code, said, why } = agent("opencode", ask, config, files);
  assert.equal(code, 0, why);
  const { type, part } = JSON.parse(said.trim().split("\n").at(-1));
  assert.equal(type, "step_finish", why);
  assert(part.tokens.output > 0); // whose text is blank now and then
});

await main("@openai/codex", "@anthropic-ai/claude-code", "opencode-ai");
