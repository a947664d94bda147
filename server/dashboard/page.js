// Asks the server twice a second what is new, keeps the last minute of it, and draws it.
import { attained, drawPages, drawSlack, drawStrip, firstTokens, paces, slackNote, tell, tellBoth } from "./charts.js";
import { Theme, count, nameOf, seconds, set, share, size } from "./format.js";
import { Detail, Table, sorted } from "./requests.js";
import { Timeline } from "./timeline.js";

const PERIOD = 500, SOON = 20, PATIENCE = 5000, KEPT = 62;     // milliseconds, milliseconds, milliseconds, seconds
const FLOW_PERIOD = 5000;                                        // milliseconds
const find = (id) => document.getElementById(id);

class Feed {
  // What the server told so far.
  constructor() {
    this.clear(null);
  }

  clear(born) {
    Object.assign(this, { born, next: 0, now: 0, steps: [], flying: [], requests: [], names: new Map(), lanes: 1, stages: 1, leftOut: {} });
  }

  add(view) {
    // False where the server is another one than before, and must be asked from the start.
    if (view.born !== this.born) {
      const asked = this.next;
      this.clear(view.born);
      if (asked > 0) return false;
    }
    for (const [number, name] of Object.entries(view.names)) this.names.set(Number(number), nameOf(...name));
    this.requests = sorted([...named(view.columns, view.requests), ...named(view.end_columns, view.ended)]);
    for (const row of this.requests) if (row.number >= 0) this.names.set(row.number, nameOf(row.id, row.index));
    for (const step of view.steps) this.steps.push(prepared(step, false));
    this.flying = view.flying.map((step) => prepared(step, true));
    let old = 0;
    while (old < this.steps.length && this.steps[old].until < view.now - KEPT) old++;
    this.steps.splice(0, old);
    if (this.names.size > 8000) this.forget();
    const one = this.steps.at(-1) ?? this.flying.at(-1);
    Object.assign(this, { next: view.next, now: view.now, lanes: view.pages.length, stages: one ? one.spans.length : this.stages, view, leftOut: view.left_out });
    return true;
  }

  forget() {
    const wanted = new Set(this.requests.map((row) => row.number));
    for (const step of this.steps) for (const chunk of step.chunks) wanted.add(chunk[0]);
    for (const number of this.names.keys()) if (!wanted.has(number)) this.names.delete(number);
  }

  name(number) {
    return this.names.get(number) ?? `sequence ${number}`;
  }

  get rate() {
    // Steps per second, of the last five.
    let steps = 0;
    while (steps < this.steps.length && this.steps[this.steps.length - 1 - steps].until > this.now - 5) steps++;
    return steps / 5;
  }
}

function named(columns, rows) {
  return rows.map((row) => {
    const out = {};
    for (let place = 0; place < columns.length; place++) out[columns[place]] = row[place];
    return out;
  });
}

function prepared(step, flying) {
  return Object.assign(step, { flying, until: step.spans.at(-1)[1], cells: new Map() });
}

class Page {
  constructor() {
    this.theme = new Theme();
    this.feed = new Feed();
    this.selected = null;
    this.paused = false;
    this.heard = null;
    this.timer = null;
    this.model = "";
    const select = (key) => this.choose(key);
    this.timeline = new Timeline(find("timeline"), find("tip"), this.theme, select);
    this.table = new Table(find("rows"), find("requests-note"), find("filter"), this.theme, select);
    this.detail = new Detail(find, this.theme);
    this.flows = new Flows();
    this.listen();
  }

  listen() {
    find("pause").addEventListener("click", () => this.pause());
    find("close").addEventListener("click", () => this.choose(null));
    find("model").addEventListener("change", () => this.turn(find("model").value));
    find("filter").addEventListener("input", () => this.draw());
    for (const button of document.querySelectorAll("[data-span]")) button.addEventListener("click", () => this.zoom(button));
    document.addEventListener("visibilitychange", () => this.again(0));
    window.addEventListener("resize", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !event.target.matches("input")) this.choose(null);
    });
  }

  pause() {
    this.paused = !this.paused;
    find("pause").setAttribute("aria-pressed", String(this.paused));
    set(find("pause"), this.paused ? "Go on" : "Pause");
    if (this.paused) this.state("paused", "");
    this.again(0);
  }

  zoom(button) {
    this.timeline.span = Number(button.dataset.span);
    for (const other of document.querySelectorAll("[data-span]")) other.setAttribute("aria-pressed", String(other === button));
    this.draw();
  }

  turn(model) {
    // Shows another model of the server.
    this.model = model;
    this.selected = null;
    this.feed.clear(null);
    this.again(0);
  }

  offer(models) {
    const select = find("model");
    select.hidden = models.length === 0;
    if (select.options.length !== models.length) select.replaceChildren(...models.map((model) => new Option(model)));
  }

  choose(key) {
    this.selected = key === this.selected ? null : key;
    this.draw();
  }

  again(milliseconds) {
    clearTimeout(this.timer);
    if (!this.paused && !document.hidden) this.timer = setTimeout(() => this.ask(), milliseconds);
  }

  async ask() {
    if (this.asking) return;
    this.asking = true;
    let wait = PERIOD;
    try {
      const answer = await fetch(`data?since=${this.feed.next}&model=${encodeURIComponent(this.model)}`, { signal: AbortSignal.timeout(PATIENCE), cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) this.fault("not allowed", "The server does not let you see this page. Reload it to give a key.");
      else if (!answer.ok) this.fault("error", `The server answered with status ${answer.status}.`);
      else wait = this.take(await answer.json());
    } catch (error) {
      if (!["TypeError", "TimeoutError", "AbortError", "NetworkError", "SyntaxError"].includes(error.name)) throw error;
      const ago = this.heard === null ? "" : ` It was last heard ${Math.round((performance.now() - this.heard) / 1000)} s ago.`;
      this.fault("server gone", `The server does not answer.${ago}`);
    } finally {
      this.asking = false;
      this.again(wait);
    }
  }

  take(told) {
    // Milliseconds until the server should be asked again.
    this.heard = performance.now();
    this.offer(told.models ?? []);
    if (told.born === undefined) {
      this.fault(told.state, `The server is ${told.state}; it is not ready yet.`);
      return PERIOD;
    }
    if (!this.feed.add(told)) return SOON;
    const ill = !told.alive || told.state === "broken";
    if (ill) this.fault("broken", "The engine has stopped. The server's log tells why.");
    else {
      if (!this.paused) this.state(told.state === "serving" ? "live" : told.state, told.state === "serving" ? "good" : "");
      find("banner").hidden = !told.doubt;
      if (told.doubt) set(find("banner"), `Predicted times cannot be trusted: ${told.doubt}.`);
      delete document.body.dataset.stale;
    }
    this.draw();
    return told.more ? SOON : PERIOD;
  }

  fault(state, message) {
    this.state(state, "bad");
    set(find("banner"), message);
    find("banner").hidden = false;
    document.body.dataset.stale = "";
  }

  state(text, tone) {
    set(find("state"), text);
    find("state").dataset.tone = tone;
  }

  draw() {
    const { feed, theme, selected } = this, { view, now } = feed;
    if (!view) return;
    const began = performance.now();
    set(find("what"), `${view.model} · ${view.mesh}`);
    set(find("running"), count(view.running));
    set(find("waiting"), count(view.waiting));
    set(find("rate"), feed.rate.toFixed(feed.rate < 10 ? 1 : 0));
    this.timeline.draw(feed, typeof selected === "number" ? selected : null);
    const line = feed.requests.filter((row) => row.slack !== null).sort((a, b) => a.relative_slack - b.relative_slack);
    drawSlack(find("slack"), theme, line);
    set(find("queue-note"), slackNote(line, feed.leftOut.waiting));
    drawPages(find("pages"), find("held-share"), find("held-note"), view);
    for (const [id, points, what] of [["ttft", firstTokens(feed.requests, now), "first token"], ["tpot", paces(feed.requests, now), "per token"]]) {
      drawStrip(find(id), theme, points, now);
      tell(find(`${id}-share`), find(`${id}-note`), points, what);
    }
    drawClasses(attained(feed.requests, now));
    drawMembers(view.members ?? []);
    this.flows.draw(view.members ?? [], performance.now());
    drawWorkers(view.workers ?? []);
    this.table.draw(feed.requests, feed.leftOut, selected);
    this.detail.draw(feed, selected);
    document.body.dataset.drawn = (performance.now() - began).toFixed(2);
  }
}

function drawClasses(classes) {
  // How many requests kept both objectives, by class, where there is more than one.
  tellBoth(find("both-share"), find("both-note"), classes);
  find("classes").hidden = classes.length < 2;
  fill("class-rows", classes.map((one) => [[one.name], [`${count(one.met)} of ${count(one.all)}`, "n"], [share(one.good, one.tokens), "n"]]));
}

function drawMembers(members) {
  // The replicas of a cluster, where the server is a conductor.
  find("members").hidden = members.length === 0;
  const usable = members.filter((member) => member.usable).length;
  set(find("members-note"), `${usable} of ${members.length} take requests`);
  fill("member-rows", members.map((member) => {
    const load = member.load ?? {};
    const held = load.pages_total - load.pages_free - load.pages_cached;
    return [
      [member.name], [member.role || "–"], [stateOf(member)], [count(load.running), "n"], [count(load.waiting), "n"],
      [seconds(load.queued_prefill_seconds), "n"], [count(member.prefills), "n"], [count(member.decodes), "n"],
      [share(member.cached_tokens, member.prompt_tokens), "n"], [share(held, load.pages_total), "n"],
      [size(member.kv?.host_bytes), "n"], [size(member.kv?.disk_bytes), "n"],
    ];
  }));
}

class Flows {
  // KV that replicas fetched from each other: in all, and how fast lately.
  constructor() {
    this.seen = [];                                              // at which milliseconds there were how many bytes, by sender and receiver
  }

  draw(members, now) {
    const flows = members.flatMap((member) => (member.kv?.fetched ?? []).map((one) => ({ ...one, to: member.name })));
    this.seen.push({ now, bytes: new Map(flows.map((one) => [pair(one), one.bytes])) });
    while (this.seen.length > 1 && this.seen[1].now <= now - FLOW_PERIOD) this.seen.shift();
    const old = this.seen[0];
    find("flows").hidden = flows.length === 0;
    set(find("flows-note"), `${size(flows.reduce((sum, one) => sum + one.bytes, 0))} in all`);
    fill("flow-rows", flows.map((one) => {
      const came = Math.max(0, one.bytes - (old.bytes.get(pair(one)) ?? 0));
      const rate = now > old.now ? came / 2 ** 20 / ((now - old.now) / 1000) : 0;
      return [[one.source], [one.to], [count(one.blocks), "n"], [size(one.bytes), "n"], [seconds(one.seconds), "n"], [rate.toFixed(1), "n"]];
    }));
  }
}

function pair(flow) {
  return `${flow.source} ${flow.to}`;
}

function stateOf(member) {
  if (member.fault) return member.fault;
  if (!member.alive) return "lost";
  if (member.leaving) return "leaves";
  return member.usable ? "alive" : "takes none";
}

function drawWorkers(workers) {
  // The processes that have the devices, where they are others than the engine's own.
  find("workers").hidden = workers.length === 0;
  const alive = workers.filter((worker) => worker.alive).length;
  set(find("workers-note"), `${alive} of ${workers.length} are there`);
  fill("worker-rows", workers.map((worker) => {
    const memory = worker.device_bytes ? `${(worker.device_bytes / 2 ** 30).toFixed(1)} GiB` : "–";
    return [[worker.worker, "n"], [worker.host ?? "–"], [worker.alive ? "alive" : "gone"], [count(worker.lag), "n"], [memory, "n"]];
  }));
}

function fill(id, rows) {
  // Writes a table's body: rows of cells, each its text and its class.
  find(id).replaceChildren(...rows.map((cells) => {
    const row = document.createElement("tr");
    for (const [text, kind] of cells) set(row.insertCell(), String(text), kind);
    return row;
  }));
}

new Page().again(0);
