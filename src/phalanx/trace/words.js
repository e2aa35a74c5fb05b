// Times, sizes and numbers as people read them.

function number(value) {
  return Math.round(value).toLocaleString("en-US");
}

function count(value, what) {
  return `${number(value)} ${what}${value === 1 ? "" : "s"}`;
}

// Three significant digits: "812 ns", "4.56 ms", "12.3 s".
function duration(ns) {
  if (!ns) return "0";
  for (const [size, unit] of [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]]) {
    if (ns >= size) return `${significant(ns / size)} ${unit}`;
  }
  return `${Math.round(ns)} ns`;
}

function size(bytes) {
  for (const [unit, name] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (bytes >= unit) return `${significant(bytes / unit)} ${name}`;
  }
  return `${Math.round(bytes)} B`;
}

function significant(value) {
  if (value >= 1000) return number(value);
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

// A moment of the run, as exact as the distance between two ticks asks for.
function moment(ns, step, largest = Math.abs(ns)) {
  const [size, unit] = largest >= 1e9 ? [1e9, "s"] : largest >= 1e6 ? [1e6, "ms"] : [1e3, "µs"];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  return `${(ns / size).toFixed(digits)} ${unit}`;
}

function percent(share) {
  if (share < 0.0005) return "0 %";
  return `${(100 * share).toFixed(share >= 0.0995 ? 0 : 1)} %`;
}

// An element with text or children; attributes by name.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}
