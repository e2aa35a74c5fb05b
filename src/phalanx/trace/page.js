// Puts the page together: search, legend, buttons.

class Search {
  constructor(model, timeline) {
    this.model = model;
    this.timeline = timeline;
    this.hits = null;
    this.at = -1;
    this.query = document.getElementById("query");
    this.tally = document.getElementById("hits");
    this.op = -1; // that alone is lit, chosen in the legend
    this.query.addEventListener("input", () => this.look());
    this.query.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && event.shiftKey) event.preventDefault(), this.jump(-1);
      if (event.key === "Escape") this.clear(), timeline.lanes.focus();
    });
    document.getElementById("search").addEventListener("submit", (event) => {
      event.preventDefault();
      this.jump(1);
    });
    document.getElementById("previous").addEventListener("click", () => this.jump(-1));
  }

  look() {
    this.hits = this.model.search(this.query.value);
    this.at = -1;
    this.light();
    this.tell();
  }
  light() {
    const { model, hits, op } = this;
    if (!hits && op < 0) return this.timeline.light(null);
    const lit = new Uint8Array(model.count);
    if (hits) for (const i of hits) lit[i] = op < 0 || model.op[i] === op ? 1 : 0;
    else for (let i = 0; i < lit.length; i++) lit[i] = model.op[i] === op ? 1 : 0;
    this.timeline.light(lit);
  }
  // Go to the next hit; the first time to the first one in view.
  jump(by) {
    const { hits, timeline, model } = this;
    if (!hits || !hits.length) return;
    if (this.at < 0 && by > 0) {
      const shown = hits.findIndex((i) => model.start[i] >= timeline.view.start);
      this.at = Math.max(shown, 0);
    } else {
      this.at = (Math.max(this.at, 0) + by + hits.length) % hits.length;
    }
    timeline.select(hits[this.at]);
    timeline.reveal(hits[this.at]);
    this.tell();
  }
  tell() {
    const { hits, at } = this;
    this.tally.textContent = !hits ? "" : !hits.length ? "no hits"
      : at < 0 ? count(hits.length, "hit") : `${number(at + 1)} of ${number(hits.length)}`;
  }
  clear() {
    this.query.value = "";
    this.op = -1;
    for (const chip of document.querySelectorAll("#legend button")) chip.ariaPressed = "false";
    this.look();
  }
  only(op) {
    this.op = op;
    this.light();
  }
}

function buildLegend(model, search) {
  const legend = document.getElementById("legend");
  const present = [...model.ops.keys()].filter((op) => model.counts[op] > 0);
  present.sort((a, b) => (a === model.rangeOp) - (b === model.rangeOp) ||
    model.totals[b] - model.totals[a]);
  for (const op of present) {
    const name = model.ops[op];
    const chip = element("button", { "aria-pressed": "false", title: `show ${name} alone` },
      element("i", { class: "dot", style: `background: var(--${HUES[name]})` }),
      name, element("small", {}, number(model.counts[op])));
    chip.addEventListener("click", () => {
      const chosen = search.op !== op;
      for (const each of legend.querySelectorAll("button")) each.ariaPressed = "false";
      chip.ariaPressed = String(chosen);
      search.only(chosen ? op : -1);
    });
    legend.append(chip);
  }
  legend.append(element("span", { class: "key" },
    element("i", { class: "sample pale" }), "waiting",
    element("i", { class: "sample solid" }), "transfer",
    element("i", { class: "sample mark" }), "came last"));
}

function setScheme(scheme, timeline) {
  document.documentElement.dataset.scheme = scheme;
  timeline.restyle();
}

async function main() {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const buffer = await unpack(document.getElementById("data").textContent);
  const model = new Model(facts, buffer);
  const { summary } = facts;
  document.getElementById("title").textContent = facts.title;
  const began = new Date(facts.began).toLocaleString(undefined,
    { dateStyle: "medium", timeStyle: "medium" });
  document.getElementById("facts-line").textContent = [
    count(model.ranks.length, "rank"), count(summary.operations, "operation"),
    duration(facts.length_ns), began].join(" · ");
  const problems = document.getElementById("problems");
  problems.hidden = !summary.problems.length;
  problems.append(...summary.problems.map((problem) => element("p", {}, problem)));

  const reveal = (i) => {
    timeline.select(i);
    timeline.reveal(i);
  };
  const panel = new Panel(model, { reveal });
  const timeline = new Timeline(model, {
    hover: (i, x, y) => panel.hover(i, x, y),
    select: (i) => panel.select(i),
  });
  const search = new Search(model, timeline);
  buildLegend(model, search);

  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => timeline.restyle());
  const actions = {
    "/": () => search.query.select(),
    n: () => search.jump(1),
    p: () => search.jump(-1),
    m: () => document.body.classList.toggle("without-panel"),
    l: () => {
      const now = document.documentElement.dataset.scheme || (dark.matches ? "dark" : "light");
      setScheme(now === "dark" ? "light" : "dark", timeline);
    },
    "?": () => document.getElementById("help").showModal(),
    Escape: () => {
      search.clear();
      timeline.select(-1);
    },
  };
  for (const [id, key] of [["scheme", "l"], ["toggle-panel", "m"], ["ask-help", "?"]]) {
    document.getElementById(id).addEventListener("click", actions[key]);
  }
  document.getElementById("fit").addEventListener("click", () => timeline.fit());
  document.addEventListener("keydown", (event) => {
    if (event.target.matches("input, dialog *") || event.metaKey || event.ctrlKey) return;
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    action();
  });
  Object.assign(window, { model, timeline, search });
}

main().catch((error) => {
  document.body.replaceChildren(element("p", { class: "broken" },
    `This page cannot be shown: ${error.message}. It needs a browser of 2023 or later.`));
  throw error;
});
