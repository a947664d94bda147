// The table of requests, and one request in detail: its figures and the chunks of it that the last minute's steps had.
import { count, nameOf, seconds, set } from "./format.js";

const MOST = 100, CHUNKS = 60;
const ORDER = { prefilling: 0, decoding: 1, waiting: 2 };

export function keyOf(row) {
  return row.number >= 0 ? row.number : `${row.id}\n${row.index}\n${row.arrival}`;
}

export function sorted(requests) {
  // Running ones first, then who waits as the server ranks them, then who ended, latest first.
  return requests.sort((a, b) => (ORDER[a.state] ?? 3) - (ORDER[b.state] ?? 3) || (b.ended ?? 0) - (a.ended ?? 0));
}

function met(value, given) {
  return value === null || given === null ? "n" : value > given ? "n bad" : "n good";
}

export class Table {
  constructor(body, note, filter, theme, select) {
    Object.assign(this, { body, note, filter, theme });
    body.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row) select(row.key);
    });
  }

  draw(requests, leftOut, selected) {
    const wanted = this.filter.value.trim().toLowerCase();
    const fits = (row) => [nameOf(row.id, row.index), row.class ?? "", row.state].some((text) => text.toLowerCase().includes(wanted));
    const found = wanted ? requests.filter(fits) : requests, some = found.slice(0, MOST);
    while (this.body.children.length > some.length) this.body.lastChild.remove();
    while (this.body.children.length < some.length) this.body.append(this.row());
    some.forEach((row, place) => this.fill(this.body.children[place], row, selected));
    const more = found.length - some.length, unnamed = leftOut.running + leftOut.waiting + leftOut.ended;
    const parts = [found.length ? `${count(some.length)} of ${count(found.length)}` : wanted ? "none fits" : "none yet"];
    if (more) parts.push("filter to find others");
    if (unnamed) parts.push(`${count(unnamed)} more on the server`);
    set(this.note, parts.join("; "));
  }

  row() {
    const row = document.createElement("tr");
    for (let place = 0; place < 10; place++) row.append(document.createElement("td"));
    const dot = document.createElement("i"), name = document.createElement("button");
    dot.className = "dot";
    name.type = "button";
    row.firstChild.append(dot, name);
    return row;
  }

  fill(element, row, selected) {
    const cells = element.children, key = keyOf(row), name = cells[0].lastChild, chosen = String(key === selected);
    if (element.key !== key) {
      element.key = key;
      cells[0].firstChild.style.background = this.theme.colour(row.number);
    }
    if (name.getAttribute("aria-pressed") !== chosen) name.setAttribute("aria-pressed", chosen);
    set(name, nameOf(row.id, row.index));
    set(cells[1], row.class ?? "");
    set(cells[2], row.state);
    set(cells[3], row.state === "prefilling" ? `${count(row.prefilled)} of ${count(row.prompt)}` : count(row.prompt), "n");
    set(cells[4], count(row.cached), "n");
    set(cells[5], count(row.generated), "n");
    set(cells[6], `${seconds(row.ttft)} / ${seconds(row.ttft_given)}`, met(row.ttft, row.ttft_given));
    set(cells[7], `${seconds(row.tpot)} / ${seconds(row.tpot_given)}`, met(row.tpot, row.tpot_given));
    set(cells[8], seconds(row.slack), row.slack !== null && row.slack < 0 ? "n bad" : "n");
    set(cells[9], row.lane === null || row.lane === undefined ? "" : String(row.lane), "n");
  }
}

export class Detail {
  constructor(find, theme) {
    Object.assign(this, { find, theme });
  }

  draw(feed, selected) {
    const { find } = this, row = feed.requests.find((row) => keyOf(row) === selected);
    const chunks = selected === null ? [] : chunksOf(feed.steps, selected, feed.view.timed !== false);
    const known = Boolean(row) || chunks.length > 0;
    find("detail-body").hidden = !known;
    find("detail-empty").hidden = known;
    find("close").hidden = selected === null;
    set(find("detail-title"), row ? nameOf(row.id, row.index) : selected === null ? "Request" : feed.name(selected));
    set(find("detail-empty"), selected === null ? "Choose a request in the table or in the timeline." : "Nothing is known of this request any more.");
    if (!known) return;
    find("detail-bar").hidden = !row;
    if (row) find("detail-bar").firstElementChild.style.width = `${(100 * (row.prefilled ?? 0)) / row.prompt}%`;
    this.facts(row ? factsOf(row, feed.now) : []);
    this.chunks(chunks);
  }

  facts(pairs) {
    const list = this.find("facts");
    while (list.children.length > 2 * pairs.length) list.lastChild.remove();
    while (list.children.length < 2 * pairs.length) list.append(document.createElement(list.children.length % 2 ? "dd" : "dt"));
    pairs.forEach(([name, value, tone], place) => {
      set(list.children[2 * place], name);
      set(list.children[2 * place + 1], value, tone ?? "");
    });
  }

  chunks(rows) {
    const body = this.find("chunks"), some = rows.slice(0, CHUNKS);
    while (body.children.length > some.length) body.lastChild.remove();
    while (body.children.length < some.length) {
      const row = document.createElement("tr");
      for (let place = 0; place < 6; place++) row.append(Object.assign(document.createElement("td"), { className: place === 0 || place === 3 ? "" : "n" }));
      body.append(row);
    }
    some.forEach((texts, place) => texts.forEach((text, column) => set(body.children[place].children[column], text)));
  }
}

function factsOf(row, now) {
  const tone = (value, given) => (value === null || given === null ? "" : value > given ? "bad" : "good");
  return [
    ["state", row.state], ["class", row.class ?? "none"],
    ["prefilled", row.prefilled === null ? "–" : `${count(row.prefilled)} of ${count(row.prompt)}`], ["from cache", count(row.cached)],
    ["generated", count(row.generated)], ["age", seconds((row.ended ?? now) - row.arrival)],
    ["first token", seconds(row.ttft), tone(row.ttft, row.ttft_given)], ["given", seconds(row.ttft_given)],
    ["per token", seconds(row.tpot), tone(row.tpot, row.tpot_given)], ["given", seconds(row.tpot_given)],
    ["both in time", typeof row.in_time !== "boolean" ? "–" : row.in_time ? "yes" : "no", row.in_time === false ? "bad" : row.in_time ? "good" : ""],
    ["longest gap", seconds(row.longest_gap)],
    ["slack", seconds(row.slack), row.slack !== null && row.slack < 0 ? "bad" : ""],
    ["lane", row.lane === null || row.lane === undefined ? "–" : String(row.lane)],
  ];
}

function chunksOf(steps, number, timed) {
  // Rows of text, latest first; decodes one after the other are one row.
  const out = [];
  let run = null;
  const close = () => {
    if (run) out.push([run.count > 1 ? `decode × ${run.count}` : "decode", `${count(run.from)}–${count(run.to)}`, run.first === run.last ? String(run.first) :
      `${run.first}–${run.last}`, run.lanes, seconds(timed ? run.predicted / run.count : null), seconds(run.took / run.count)]);
    run = null;
  };
  for (const step of steps) {
    const chunk = step.chunks.find((chunk) => chunk[0] === number);
    if (!chunk) continue;
    const [, lanes, start, length, decode] = chunk;
    if (!decode) {
      close();
      out.push(["prefill", `${count(start)}–${count(start + length - 1)}`, String(step.number), lanes.join(", "), seconds(timed ? step.predicted : null), seconds(step.took)]);
      continue;
    }
    run ??= { count: 0, from: start, first: step.number, lanes: lanes.join(", "), predicted: 0, took: 0 };
    run.count++;
    Object.assign(run, { to: start, last: step.number, predicted: run.predicted + step.predicted, took: run.took + step.took });
  }
  close();
  return out.reverse();
}
