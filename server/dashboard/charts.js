// The queue by slack, pages by lane, and how first tokens and tokens kept to their objectives.
import { count, nameOf, seconds, set, share, sharp } from "./format.js";

const ROW = 20, AXIS = 18, LABEL = 130, VALUE = 84, MOST = 56;
const HIGH = 10;                                        // times an objective at the top and below it at the bottom of a strip

export function drawSlack(canvas, theme, rows) {
  // rows: those that have no first token yet, least relative slack first.
  const [context, width, height] = sharp(canvas);
  context.fillStyle = theme.dim;
  if (!rows.length) {
    context.textAlign = "center";
    context.fillText("Nothing waits for its first token.", width / 2, height / 2);
    return;
  }
  const some = rows.slice(0, MOST), bottom = height - AXIS, tall = Math.min(ROW, bottom / some.length), named = tall >= 12;
  const left = named ? LABEL : 20, room = width - left - (named ? VALUE : 20), zero = left + room / 3, unit = (room * 2) / 3;
  context.textAlign = "center";
  for (const part of [-0.5, 0, 0.5, 1]) {
    context.fillStyle = part ? theme.line : theme.dim;
    context.fillRect(Math.round(zero + part * unit), 0, 1, bottom + 3);
    context.fillStyle = theme.dim;
    context.fillText(`${part < 0 ? "−" : ""}${Math.abs(100 * part)} %`, zero + part * unit, bottom + 10);
  }
  some.forEach((row, place) => {
    const y = place * tall, slack = row.relative_slack ?? 1, size = Math.max(-0.5, Math.min(1, slack)) * unit;
    context.globalAlpha = row.state === "prefilling" ? 1 : 0.6;
    context.fillStyle = slack < 0 ? theme.bad : theme.accent;
    context.fillRect(Math.min(zero, zero + size), y + Math.min(2, tall / 8), Math.max(1, Math.abs(size)), tall - Math.min(4, tall / 4));
    context.globalAlpha = 1;
    if (named) {
      context.textAlign = "left";
      context.fillStyle = theme.text;
      context.fillText(clipped(context, nameOf(row.id, row.index), LABEL - 10), 0, y + tall / 2);
      context.textAlign = "right";
      context.fillStyle = slack < 0 ? theme.bad : theme.dim;
      context.fillText(row.slack === null ? "–" : row.slack < 0 ? `${seconds(-row.slack)} late` : `${seconds(row.slack)} left`, width, y + tall / 2);
    }
  });
}

export function slackNote(rows, unnamed) {
  const late = rows.filter((row) => row.slack < 0).length, more = unnamed + Math.max(0, rows.length - MOST);
  if (!rows.length) return "";
  return `${count(rows.length + unnamed)} in line${late ? `, ${count(late)}${unnamed ? " or more" : ""} too late` : ""}${more ? `; ${count(more)} not drawn` : ""}`;
}

function clipped(context, text, room) {
  if (context.measureText(text).width <= room) return text;
  while (text.length > 1 && context.measureText(`${text}…`).width > room) text = text.slice(0, -Math.ceil(text.length / 12));
  return `${text}…`;
}

export function drawPages(container, value, note, { pages, copied, reads, segment }) {
  const all = reads.reduce((sum, blocks) => sum + blocks, 0);
  const sum = (place) => pages.reduce((all, lane) => all + lane[place], 0), held = sum(2), whole = sum(0) + sum(1) + held;
  set(value, share(held, whole));
  set(note, `held of ${count(whole)} pages`);
  while (container.children.length > pages.length) container.lastChild.remove();
  while (container.children.length < pages.length) container.append(laneBar());
  pages.forEach(([free, cached, held], lane) => {
    const [text, bar, pool] = container.children[lane].children, whole = free + cached + held;
    set(text.children[0], `lane ${lane}`);
    set(text.children[1], `${count(held)} held, ${count(cached)} cached, ${count(free)} free`);
    set(pool, pages.length > 1 ? `reads ${count(Math.ceil(reads[lane] / segment))} segments a step, ${share(reads[lane], all)} of all; copies on ${count(copied[lane])} pages` : "");
    [held, cached].forEach((part, place) => {
      const size = `${((100 * part) / whole).toFixed(2)}%`;
      if (bar.children[place].style.width !== size) bar.children[place].style.width = size;
    });
  });
}

function laneBar() {
  const lane = document.createElement("div"), text = document.createElement("p"), bar = document.createElement("div");
  lane.className = "lane";
  text.append(document.createElement("b"), document.createElement("span"));
  bar.className = "bar";
  for (const name of ["held", "cached"]) bar.append(Object.assign(document.createElement("i"), { className: name }));
  const pool = document.createElement("p");
  pool.className = "pool";
  lane.append(text, bar, pool);
  return lane;
}

export function firstTokens(requests, now) {
  // Of the last minute; those that ended without one count where it was due: {at, value, given}.
  return requests.filter((row) => row.ttft_given && (row.ttft !== null || row.ended)).map((row) => row.ttft !== null
    ? { at: row.arrival + row.ttft, value: row.ttft, given: row.ttft_given }
    : { at: row.ended, value: row.ended - row.arrival, given: row.ttft_given, none: true })
    .filter((point) => point.at >= now - 60 && (!point.none || point.value > point.given));
}

export function paces(requests, now) {
  // Seconds per token of those that ended in the last minute, and so far of those that run.
  return requests.filter((row) => row.tpot !== null && row.tpot_given)
    .map((row) => ({ at: row.ended ?? now, value: row.tpot, given: row.tpot_given })).filter((point) => point.at >= now - 60);
}

export function attained(requests, now) {
  // Of the requests that ended in the last minute, by class, largest first: how many there were, how many kept both
  // objectives, and the same of their tokens. A request may have several completions, each with a row; it is in time if all were.
  const ended = new Map(), classes = new Map();
  for (const row of requests) {
    if (row.ended === undefined || row.ended < now - 60 || typeof row.in_time !== "boolean") continue;
    const key = `${row.id}\n${row.arrival}`, one = ended.get(key) ?? { name: row.class ?? "default", met: true, tokens: 0, good: 0 };
    ended.set(key, Object.assign(one, { met: one.met && row.in_time, tokens: one.tokens + row.generated, good: one.good + (row.in_time ? row.generated : 0) }));
  }
  for (const { name, met, tokens, good } of ended.values()) {
    const sum = classes.get(name) ?? { name, all: 0, met: 0, tokens: 0, good: 0 };
    classes.set(name, Object.assign(sum, { all: sum.all + 1, met: sum.met + (met ? 1 : 0), tokens: sum.tokens + tokens, good: sum.good + good }));
  }
  return [...classes.values()].sort((a, b) => b.all - a.all);
}

export function drawStrip(canvas, theme, points, now) {
  // Points over the last minute: measured over objective, by powers of ten; the line is where they are equal.
  const [context, width, height] = sharp(canvas), left = 30, y = (ratio) => {
    const place = Math.log10(Math.max(1 / HIGH, Math.min(HIGH, ratio))) / Math.log10(HIGH);
    return height / 2 - place * (height / 2 - 7);
  };
  context.textAlign = "right";
  for (const [ratio, label] of [[HIGH, `×${HIGH}`], [1, "×1"], [1 / HIGH, `×${1 / HIGH}`]]) {
    context.fillStyle = ratio === 1 ? theme.dim : theme.line;
    context.fillRect(left, Math.round(y(ratio)), width - left, 1);
    context.fillStyle = theme.dim;
    context.fillText(label, left - 6, y(ratio));
  }
  context.globalAlpha = 0.75;
  for (const { at, value, given } of points) {
    context.fillStyle = value > given ? theme.bad : theme.good;
    context.fillRect(left + ((at - now + 60) / 60) * (width - left - 6), y(value / given) - 2.5, 5, 5);
  }
  context.globalAlpha = 1;
}

export function tellBoth(value, note, classes) {
  const all = classes.reduce((sum, one) => sum + one.all, 0), met = classes.reduce((sum, one) => sum + one.met, 0);
  set(value, share(met, all), all ? (met === all ? "good" : "") : "");
  set(note, all ? `both objectives: ${count(met)} of ${count(all)} in time` : "both objectives: none ended yet");
}

export function tell(value, note, points, what) {
  const met = points.filter((point) => point.value <= point.given).length;
  set(value, share(met, points.length), points.length ? (met === points.length ? "good" : "") : "");
  set(note, points.length ? `${what}: ${count(met)} of ${count(points.length)} in time` : `${what}: none yet`);
}
