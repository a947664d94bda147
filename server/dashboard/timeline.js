// Steps as boxes over time, one row per lane and stage; in a box the chunks, coloured by request: prompts above, decodes below.
import { count, seconds, sharp } from "./format.js";

const GUTTER = 104, AXIS = 20, AHEAD = 0.03, CROWD = 24, THIN = 3;
const TICKS = { 5: 1, 15: 3, 60: 10 };

export function cells(step, lane, fine = true) {
  // What a lane does in a step, from top to bottom: [{chunk, from, to}] in shares of the height; chunk null: decodes together, as all are
  // where that is not `fine`.
  const key = fine ? lane : -1 - lane;
  let found = step.cells.get(key);
  if (found) return found;
  const mine = step.chunks.filter((chunk) => chunk[1].includes(lane));
  const prompts = mine.filter((chunk) => !chunk[4]), decodes = mine.filter((chunk) => chunk[4]);
  const running = step.decodes[lane] || 0, tokens = prompts.reduce((sum, chunk) => sum + chunk[3], 0);
  const below = running ? (tokens ? Math.min(0.5, 0.25 + running / 64) : 1) : 0;
  let at = 0;
  found = prompts.map((chunk) => ({ chunk, from: at, to: (at += ((1 - below) * chunk[3]) / tokens) }));
  if (running > (fine ? Math.min(CROWD, decodes.length) : 2)) found.push({ chunk: null, decodes, running, from: at, to: 1 });
  else found.push(...decodes.map((chunk) => ({ chunk, from: at, to: (at += below / decodes.length) })));
  step.cells.set(key, found);
  return found;
}

export class Timeline {
  constructor(canvas, tip, theme, select) {
    Object.assign(this, { canvas, tip, theme, select, span: 15, hover: null, cursor: null, feed: null, selected: null });
    canvas.addEventListener("mousemove", (event) => this.point(event));
    canvas.addEventListener("mouseleave", () => this.show((this.hover = null)));
    canvas.addEventListener("click", () => this.choose(this.hover));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.show((this.cursor = null)));
  }

  get rows() {
    return this.feed.lanes * this.feed.stages;
  }

  get tall() {
    return Math.max(12, Math.min(36, Math.floor(208 / this.rows)));
  }

  top(row) {
    return row * this.tall + Math.floor(row / this.feed.stages) * 6;
  }

  x(time) {
    return GUTTER + ((time - this.begin) / (this.end - this.begin)) * (this.width - GUTTER);
  }

  draw(feed, selected) {
    Object.assign(this, { feed, selected });
    const bottom = this.top(this.rows - 1) + this.tall, [context, width] = sharp(this.canvas, bottom + AXIS);
    Object.assign(this, { context, width, end: feed.now + AHEAD * this.span, begin: feed.now - (1 - AHEAD) * this.span });
    this.frame(bottom);
    context.save();
    context.beginPath();
    context.rect(GUTTER, 0, width - GUTTER, bottom);
    context.clip();
    const drawn = new Float64Array(this.rows).fill(-1);
    for (let place = this.first(); place < feed.steps.length; place++) this.box(feed.steps[place], drawn, 1);
    drawn.fill(-1);
    for (const step of feed.flying) this.box(step, drawn, 0.45);
    context.restore();
    if (this.cursor) this.outline(this.cursor);
  }

  first() {
    // Place of the first step that is seen.
    const steps = this.feed.steps;
    let low = 0, high = steps.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (steps[middle].until < this.begin) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  frame(bottom) {
    const { context, theme, feed, width } = this;
    for (let row = 0; row < this.rows; row++) {
      const y = this.top(row), lane = Math.floor(row / feed.stages), stage = row % feed.stages;
      context.fillStyle = theme.track;
      context.fillRect(GUTTER, y, width - GUTTER, this.tall - 2);
      context.fillStyle = theme.dim;
      context.textAlign = "left";
      if (stage === 0) context.fillText(`lane ${lane}`, 0, y + this.tall / 2 - 1);
      context.textAlign = "right";
      if (feed.stages > 1) context.fillText(`stage ${stage}`, GUTTER - 10, y + this.tall / 2 - 1);
    }
    context.textAlign = "center";
    for (let back = 0; back < this.span; back += TICKS[this.span]) {
      const x = Math.round(this.x(feed.now - back)) + 0.5;
      context.fillStyle = theme.line;
      context.fillRect(x - 0.5, 0, 1, bottom + 3);
      context.fillStyle = theme.dim;
      context.fillText(back ? `−${back} s` : "now", Math.min(x, width - 12), bottom + 12);
    }
  }

  box(step, drawn, alpha) {
    const { feed } = this;
    for (let stage = 0; stage < feed.stages; stage++) {
      const [start, stop] = step.spans[stage], left = Math.max(this.x(start), GUTTER), right = this.x(stop);
      if (right < GUTTER) continue;
      for (let lane = 0; lane < feed.lanes; lane++) {
        const row = lane * feed.stages + stage;
        if (right - drawn[row] < 0.75) continue;                     // nothing of it would be seen
        const from = Math.max(left, drawn[row]), wide = right - from, inside = cells(step, lane, wide >= THIN);
        if (!inside.length) continue;
        this.fill(inside, from, this.top(row), wide > 4 ? wide - 1 : Math.max(wide, 0.75), alpha);
        drawn[row] = right;
      }
    }
  }

  fill(inside, left, top, wide, alpha) {
    const { context, theme, selected } = this, tall = this.tall - 2;
    for (const cell of inside) {
      const mine = selected !== null && (cell.chunk ? cell.chunk[0] === selected : cell.decodes.some((chunk) => chunk[0] === selected));
      context.globalAlpha = selected === null || mine ? alpha : alpha * 0.4;
      if (cell.chunk) context.fillStyle = theme.colour(cell.chunk[0], cell.chunk[4]);
      else context.fillStyle = mine ? theme.colour(selected, true) : theme.crowd;
      const high = (cell.to - cell.from) * tall;
      context.fillRect(left, top + cell.from * tall, wide, high > 5 && wide > 4 ? high - 1 : high);
    }
    context.globalAlpha = 1;
  }

  outline({ step, row }) {
    const [start, stop] = step.spans[row % this.feed.stages], left = Math.max(this.x(start), GUTTER);
    this.context.strokeStyle = this.theme.text;
    this.context.lineWidth = 2;
    this.context.strokeRect(left, this.top(row), Math.max(2, this.x(stop) - left), this.tall - 2);
  }

  find(x, y) {
    // {step, row, cell} at a point; null where there is none.
    const { feed } = this;
    if (!feed || x < GUTTER) return null;
    let row = 0;
    while (row < this.rows && y >= this.top(row) + this.tall) row++;
    if (row === this.rows || y < this.top(row)) return null;
    const lane = Math.floor(row / feed.stages), stage = row % feed.stages, height = (y - this.top(row)) / (this.tall - 2);
    let best = null, near = 3;
    for (const step of [...feed.steps.slice(this.first()), ...feed.flying]) {
      const [start, stop] = step.spans[stage], apart = Math.max(this.x(start) - x, x - this.x(stop), 0);
      if (apart < near && cells(step, lane).length) [best, near] = [step, apart];
    }
    return best && { step: best, row, cell: cells(best, lane).find((cell) => height < cell.to) || cells(best, lane).at(-1) };
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.hover = this.find(event.clientX - box.left, event.clientY - box.top);
    this.show(this.hover, event.clientX - box.left);
  }

  choose(found) {
    if (!found) return;
    const chunk = found.cell.chunk || found.cell.decodes[0];
    if (chunk) this.select(chunk[0]);
  }

  key(event) {
    const { feed } = this, seen = feed ? feed.steps.slice(this.first()) : [];
    const sideways = { ArrowLeft: -1, ArrowRight: 1 }[event.key], down = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (event.key === "Enter") this.choose(this.cursor);
    if (!seen.length || (!sideways && !down)) return;
    event.preventDefault();
    let row = this.cursor ? Math.min(this.rows - 1, Math.max(0, this.cursor.row + (down || 0))) : 0;
    const mine = seen.filter((step) => cells(step, Math.floor(row / feed.stages)).length);
    if (!mine.length) return;
    let place = this.cursor ? mine.findIndex((step) => step.number >= this.cursor.step.number) : mine.length;
    if (place < 0) place = mine.length;
    const step = mine[Math.min(mine.length - 1, Math.max(0, place + (sideways || 0)))];
    this.cursor = { step, row, cell: cells(step, Math.floor(row / feed.stages))[0] };
    this.draw(feed, this.selected);
    this.show(this.cursor, this.x(step.spans[row % feed.stages][1]));
  }

  show(found, x) {
    this.tip.hidden = !found;
    if (!found) return;
    this.tip.replaceChildren(...this.lines(found).map((text) => {
      const line = document.createElement("p");
      line.textContent = text;
      return line;
    }));
    const home = this.canvas.parentElement, left = home.offsetLeft + x;
    this.tip.style.left = `${Math.max(8, left + 16 + this.tip.offsetWidth > home.offsetLeft + this.width ? left - 16 - this.tip.offsetWidth : left + 16)}px`;
    this.tip.style.top = `${home.offsetTop + this.top(found.row) - home.scrollTop + this.tall + 4}px`;
  }

  lines({ step, row, cell }) {
    const { feed } = this, lane = Math.floor(row / feed.stages), stage = row % feed.stages;
    const place = `step ${step.number}, lane ${lane}${feed.stages > 1 ? `, stage ${stage}` : ""}`;
    const timed = feed.view.timed !== false, took = `took ${seconds(step.took)}`;
    const predicted = timed ? `${seconds(step.predicted)} predicted` : "nothing predicted";
    const time = `${step.flying ? "in flight" : took}, ${predicted}`;
    if (!cell.chunk) {
      const few = cell.decodes.slice(0, 4).map((chunk) => feed.name(chunk[0]));
      return [`${cell.running} decodes`, `${few.join(", ")}${cell.running > few.length ? ", …" : ""}`, place, time];
    }
    const [number, lanes, start, length, decode] = cell.chunk;
    const what = decode ? `decode at position ${count(start)}` : `prefill of tokens ${count(start)} to ${count(start + length)}`;
    return [feed.name(number), what + (lanes.length > 1 ? ` on lanes ${lanes.join(", ")}` : ""), place, time];
  }
}
