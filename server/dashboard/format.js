// Numbers as text, requests as colours, canvases as sharp as the screen.

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0) return `−${seconds(-value)}`;
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 0.1) return `${(value * 1e3).toFixed(1)} ms`;
  if (value < 1) return `${(value * 1e3).toFixed(0)} ms`;
  return value < 100 ? `${value.toFixed(2)} s` : `${value.toFixed(0)} s`;
}

export function count(value) {
  return value === null || value === undefined ? "–" : value.toLocaleString("en");
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  return bytes < 2 ** 30 ? `${(bytes / 2 ** 20).toFixed(1)} MiB` : `${(bytes / 2 ** 30).toFixed(2)} GiB`;
}

export function share(part, whole) {
  return whole ? `${Math.floor((100 * part) / whole)} %` : "–";
}

export function nameOf(id, index) {
  return index ? `${id} [${index}]` : id;
}

export function set(element, text, className) {
  // Writes only what changed: the browser lays nothing out again for the rest.
  if (element.textContent !== text) element.textContent = text;
  if (className !== undefined && element.className !== className) element.className = className;
}

export class Theme {
  // The style sheet's colours, for canvases, and one colour per request: neighbours in number are far apart in hue.
  constructor() {
    this.read();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.read());
  }

  read() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["card", "line", "track", "text", "dim", "accent", "crowd", "good", "bad", "shade", "pale"]) {
      this[name] = style.getPropertyValue(`--${name}`).trim();
    }
    this.colours = new Map();
  }

  colour(number, pale = false) {
    const key = pale ? -1 - number : number;
    let colour = this.colours.get(key);
    if (colour === undefined) {
      if (this.colours.size > 5000) this.colours.clear();
      const hue = Math.round((205 + number * 137.508) % 360);
      colour = number < 0 ? this.crowd : `hsl(${hue} 50% ${this.shade}${pale ? ` / ${this.pale}` : ""})`;
      this.colours.set(key, colour);
    }
    return colour;
  }
}

export function sharp(canvas, height) {
  // The canvas's context in CSS pixels, cleared; [context, width, height].
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, tall = height ?? canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(tall * scale)) {
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(tall * scale);
    if (height !== undefined) canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, tall);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return [context, width, tall];
}
