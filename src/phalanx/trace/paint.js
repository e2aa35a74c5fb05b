// Colours, which follow the scheme of the page, and small drawings.

const HUES = {
  all_reduce: "blue", reduce: "sky", reduce_scatter: "teal", all_gather: "green", gather: "lime",
  broadcast: "violet", scatter: "amber", all_to_all: "pink", send: "orange", recv: "brown",
  barrier: "slate", range: "range",
};

class Paint {
  constructor(ops) {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(`--${name}`).trim();
    this.solid = ops.map((op) => read(HUES[op]));
    this.pale = ops.map((op) => read(`${HUES[op]}-pale`));
    for (const name of ["text", "muted", "faint", "line", "ground", "lane", "late", "accent",
      "on-solid", "on-pale", "shade", "waiting"]) {
      this[name.replace(/-(.)/, (_, letter) => letter.toUpperCase())] = read(name);
    }
    this.font = "11px " + read("font");
    this.strong = "600 12px " + read("font");
  }
}

// Make a canvas as fine as the screen and return its context, in CSS pixels.
function sharpen(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d", { alpha: false });
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}

// A text cut to what fits; "" if that says nothing.
const widths = new Map();
function fitted(context, text, room) {
  if (room < 14) return "";
  const key = context.font + text;
  let width = widths.get(key);
  if (width === undefined) {
    width = context.measureText(text).width;
    if (widths.size > 20000) widths.clear();
    widths.set(key, width);
  }
  if (width <= room) return text;
  const letters = Math.floor((text.length * room) / width) - 1;
  return letters < 3 ? "" : `${text.slice(0, letters)}…`;
}

// The distance between ticks that gives each some room: 1, 2 or 5 times a power of ten.
function tickStep(span, count) {
  const rough = span / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(Math.max(rough, 1)));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
}
