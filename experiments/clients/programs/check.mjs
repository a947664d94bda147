// Runs the calls of one client for Node, as check.py does for Python: the same variables of the
// environment, the same lines of JSON.

import fs from "node:fs";

export const URL_ = process.env.CHECK_URL;
export const BASE = `${URL_}/v1`;
export const MODEL = process.env.CHECK_MODEL;
const SECONDS = 180;
const REASON = 400;
const calls = [];

export function call(name, run) {
  calls.push([name, run]);
}

export async function main(...packages) {
  const versions = {};
  for (const name of packages) {
    versions[name] = JSON.parse(fs.readFileSync(`node_modules/${name}/package.json`)).version;
  }
  write({ versions });
  for (const [name, run] of calls) {
    const began = Date.now();
    let reason = null;
    try {
      await inTime(run());
    } catch (error) {
      console.error(name, error);
      reason = `${error?.name}: ${error?.message}`.replace(/\s+/g, " ").slice(0, REASON);
    }
    write({ call: name, reason, seconds: (Date.now() - began) / 1000 });
  }
  process.exit(0);
}

function write(fields) {
  fs.appendFileSync(process.env.CHECK_RESULTS, JSON.stringify(fields) + "\n");
}

function inTime(promise) {
  const late = new Promise((_, reject) =>
    setTimeout(() => reject(new Error(`no answer in ${SECONDS} s`)), SECONDS * 1000).unref(),
  );
  return Promise.race([promise, late]);
}
