// What is told in words: the summary beside the timeline, the tooltip, the selected operation.

class Panel {
  constructor(model, on) {
    this.model = model;
    this.on = on; // reveal(event)
    this.tooltip = document.getElementById("tooltip");
    this.selection = element("section", { id: "selection", hidden: "" });
    const sections = [this.unmet(), this.waiting(), this.stragglers(), this.slowest(), this.groups()];
    document.getElementById("panel").append(this.selection, ...sections.filter(Boolean));
  }

  dot(op) {
    return element("i", { class: "dot", style: `background: var(--${HUES[op]})` });
  }
  section(title, about, ...children) {
    return element("section", {}, element("h2", {}, title), element("p", {}, about), ...children);
  }

  unmet() {
    const rows = this.model.summary.unmet.slice(0, 6).map((entry) =>
      this.entry(entry.index, entry.op, entry.site, `#${number(entry.sequence)}`,
        element("span", {}, element("b", { class: "late" }, this.absent(entry)),
          ` never came on ${entry.group}; others waited `
            + duration(entry.waited_seconds * 1e9))));
    return rows.length
      ? this.section("Not met", "collectives that some ranks did not come to", ...rows) : null;
  }
  absent({ absent }) {
    if (!absent.length) return "a rank without a record";
    return `${absent.length === 1 ? "rank" : "ranks"} ${absent.join(", ")}`;
  }

  waiting() {
    const { ranks, seconds } = this.model.summary;
    const most = Math.max(...ranks.map((rank) => rank.lost_seconds + rank.transfer_seconds), 1e-9);
    const rows = ranks.map((rank) => {
      const part = (value, name) =>
        element("span", { class: name, style: `width: ${(100 * value) / most}%` });
      return element("div", { class: "bar-row" },
        element("span", { class: "who" }, `rank ${rank.rank}`),
        element("span", {
          class: "bar",
          title: `transferring for ${duration(rank.transfer_seconds * 1e9)}, came last ` +
            `${number(rank.came_last)} times and kept others for ` +
            `${duration(rank.kept_others_seconds * 1e9)}`,
        }, part(rank.lost_seconds, "lost"), part(rank.transfer_seconds, "moving")),
        element("span", { class: "figure" }, duration(rank.lost_seconds * 1e9)),
        element("span", { class: "share" }, percent(rank.lost_seconds / (seconds || 1))),
      );
    });
    const many = 16;
    if (rows.length > many) {
      const most = ranks.map((_, i) => i).sort((a, b) => ranks[b].lost_seconds - ranks[a].lost_seconds);
      const others = most.slice(many - 4).sort((a, b) => a - b).map((i) => rows[i]);
      const shown = most.slice(0, many - 4).map((i) => rows[i]);
      const more = element("details", {},
        element("summary", {}, `${others.length} ranks that lost less`), ...others);
      rows.splice(0, rows.length, ...shown, more);
    }
    return this.section("Time lost to waiting",
      "in which a rank stood still until others came; beside it, in colour, moving data", ...rows);
  }

  stragglers() {
    const all = this.model.summary.stragglers;
    const entries = all.filter((each) => each.waited_seconds > 1e-3 * all[0].waited_seconds);
    if (!entries.length) return null;
    const rows = entries.slice(0, 8).map((entry) =>
      this.entry(entry.index, entry.op, entry.site, duration(entry.waited_seconds * 1e9),
        element("span", {}, element("b", { class: "late" }, `rank ${entry.rank}`), " last ",
          entry.meetings > 1
            ? `${percent(entry.rank_share)} of ${number(entry.meetings)} · worst ` : "by ",
          duration(entry.worst_late_seconds * 1e9))));
    return this.section("Waited for", "where ranks came late, by the time that others waited",
      ...rows);
  }

  slowest() {
    const rows = this.model.summary.slowest.slice(0, 8).map((entry) => {
      const about = [`#${number(entry.sequence)} on ${entry.group}`];
      if (entry.bytes) about.push(size(entry.bytes));
      if (entry.wait_seconds !== null && entry.seconds > 0) {
        about.push(`${percent(entry.wait_seconds / entry.seconds)} waiting`);
      }
      if (entry.state !== "done") {
        about.push(entry.state === "waiting" ? "not finished" : entry.state);
      }
      return this.entry(entry.index, entry.op, entry.site, duration(entry.seconds * 1e9),
        element("span", {}, about.join(" · ")));
    });
    return rows.length
      ? this.section("Slowest operations", "on the rank that was in them longest", ...rows) : null;
  }

  entry(index, op, site, figure, about) {
    return element("button", { class: "entry", onclick: () => this.on.reveal(index) },
      element("span", { class: "line" }, this.dot(op), element("code", {}, site || op),
        element("span", { class: "figure" }, figure)),
      element("span", { class: "about" }, `${op} · `, about));
  }

  groups() {
    const entries = [...this.model.summary.groups].sort((a, b) => b.bytes - a.bytes);
    if (!entries.length) return null;
    const most = Math.max(...entries.map((entry) => entry.bytes), 1);
    const rows = entries.slice(0, 12).map((entry) =>
      element("div", { class: "bar-row" },
        element("span", { class: "who", title: `ranks ${entry.ranks.join(", ")}` }, entry.name),
        element("span", { class: "bar" },
          element("span", { class: "moving", style: `width: ${(100 * entry.bytes) / most}%` })),
        element("span", { class: "figure" }, size(entry.bytes)),
        element("span", { class: "share" }, `${number(entry.operations)}×`)));
    return this.section("Bytes per group", "and operations, of all ranks together", ...rows);
  }

  // The facts of an event as pairs, and a bar of waiting and transfer.
  describe(i) {
    const model = this.model;
    const facts = [];
    const add = (name, value) => value && facts.push([name, value]);
    add("rank", String(model.rank[i]));
    if (model.isRange(i)) {
      add("lasted", duration(model.length[i]));
      return facts;
    }
    const op = model.ops[model.op[i]];
    const [site, api] = model.sites[model.site[i]];
    const [group, ranks] = model.groups[model.group[i]];
    add("call site", site);
    add("called as", api !== op ? api : "");
    add("group", `${group} (${ranks} ranks)`);
    if (op !== "barrier") {
      const dtype = model.words.dtype[model.dtype[i]];
      add("tensor", `${dtype} ${model.shapes[model.shape[i]]}`);
      add("size", size(model.bytes[i]));
    }
    if (REDUCTIONS.has(op)) add("reduces", model.words.reduce[model.reduce[i]]);
    if (op === "send") add("to", `rank ${model.peer[i]}, tag ${model.tag[i]}`);
    else if (op === "recv") {
      const peer = model.peer[i] < 0 ? "any rank" : `rank ${model.peer[i]}`;
      add("from", `${peer}, tag ${model.tag[i]}`);
    } else if (model.peer[i] >= 0) add("root", `rank ${model.peer[i]}`);
    if (model.parts[i]) add("batch", `${model.part[i]} of ${model.parts[i]}`);
    add("begins", `at ${moment(model.start[i], 1e3)}`);
    if (model.flags[i] & ASYNC) add("async", `queued for ${duration(model.queued[i])}`);
    if (model.state[i] !== STATES.done) {
      add("state", model.isOver(i) ? model.words.state[model.state[i]] : "not finished");
    }
    return facts;
  }

  card(i) {
    const model = this.model;
    const head = element("div", { class: "head" }, this.dot(model.ops[model.op[i]]),
      element("strong", {}, model.name(i)));
    if (!model.isRange(i)) {
      head.append(element("span", { class: "sequence" }, `#${number(model.sequence[i])}`));
    }
    head.append(element("span", { class: "figure" }, duration(model.length[i])));
    const list = element("dl", {});
    for (const [name, value] of this.describe(i)) {
      list.append(element("dt", {}, name), element("dd", {}, value));
    }
    return [head, this.split(i), this.verdict(i), list].filter(Boolean);
  }
  split(i) {
    const model = this.model;
    if (model.isRange(i)) return null;
    if (model.wait[i] < 0) {
      return element("p", { class: "unknown" }, "wait unknown: another rank's record is missing");
    }
    const hue = HUES[model.ops[model.op[i]]];
    const transfer = model.length[i] - model.wait[i];
    const share = model.length[i] > 0 ? (100 * model.wait[i]) / model.length[i] : 0;
    return element("div", { class: "split" },
      element("div", { class: "track", style: `background: var(--${hue})` },
        element("span", { style: `width: ${share}%; background: var(--${hue}-pale)` })),
      element("span", {}, "wait ", element("b", {}, duration(model.wait[i]))),
      element("span", {}, "transfer ", element("b", {}, duration(transfer))));
  }
  verdict(i) {
    const model = this.model;
    const meeting = model.meeting[i];
    if (meeting >= 0 && !model.complete[meeting] && model.state[i] !== STATES.done) {
      const entry = model.summary.unmet.find((each) => model.meeting[each.index] === meeting);
      const came = `${model.companions(i).length} of ${model.groups[model.group[i]][1]} ranks`;
      return element("p", { class: "verdict" },
        element("b", { class: "late" }, entry ? this.absent(entry) : came),
        entry ? ` never came; ${came} did` : " came");
    }
    if (meeting < 0 || !(model.late[meeting] > 0)) return null;
    const who = model.isLast(i) ? "this rank" : `rank ${model.rank[model.last[meeting]]}`;
    return element("p", { class: "verdict" },
      element("b", { class: "late" }, who),
      ` came last, ${duration(model.late[meeting])} after the first`);
  }

  hover(i, x, y) {
    const { tooltip } = this;
    tooltip.hidden = i < 0;
    if (i < 0) return;
    if (this.shown !== i) tooltip.replaceChildren(...this.card(i));
    this.shown = i;
    const { width, height } = tooltip.getBoundingClientRect();
    const left = x + 18 + width > innerWidth ? x - 18 - width : x + 18;
    const top = Math.min(y + 16, innerHeight - height - 10);
    tooltip.style.transform = `translate(${Math.max(left, 8)}px, ${Math.max(top, 8)}px)`;
  }
  select(i) {
    this.selection.hidden = i < 0;
    if (i < 0) return;
    this.selection.replaceChildren(
      element("h2", {}, "Selected"), ...this.card(i), ...this.arrivals(i));
    document.getElementById("panel").scrollTop = 0;
  }
  // When each rank of a collective came.
  arrivals(i) {
    const { model } = this;
    const meeting = model.meeting[i];
    if (meeting < 0 || !(model.late[meeting] > 0)) return [];
    const members = model.companions(i);
    const first = Math.min(...members.map((each) => model.start[each]));
    const rows = members.sort((a, b) => model.rank[a] - model.rank[b]).map((each) => {
      const late = model.start[each] - first;
      const name = model.isLast(each) ? "bar late-bar" : "bar";
      const width = (100 * late) / model.late[meeting];
      return element("button", { class: "bar-row", onclick: () => this.on.reveal(each) },
        element("span", { class: "who" }, `rank ${model.rank[each]}`),
        element("span", { class: name },
          element("span", { class: "lost", style: `width: ${width}%` })),
        element("span", { class: "figure" }, late > 0 ? `+${duration(late)}` : "first"));
    });
    return [element("h3", {}, "Arrivals"), ...rows];
  }
}
