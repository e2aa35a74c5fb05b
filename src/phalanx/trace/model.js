// What was recorded: columns of numbers, one entry per event, ordered by rank, row and start.

const ASYNC = 1;
const STATES = { waiting: 0, done: 1 };
const TYPES = {
  f8: Float64Array, i4: Int32Array, u4: Uint32Array, u2: Uint16Array, u1: Uint8Array,
};
const REDUCTIONS = new Set(["all_reduce", "reduce", "reduce_scatter"]);

async function unpack(base64) {
  const packed = Uint8Array.from(atob(base64), (letter) => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

class Model {
  constructor(facts, buffer) {
    Object.assign(this, facts);
    for (const [name, type, offset, count] of facts.columns) {
      this[name] = new TYPES[type](buffer, offset, count);
    }
    this.count = this.start.length;
    this.ops = [...facts.words.op, "range"];
    this.rangeOp = facts.words.op.length;
    this.rows = facts.rows.map(([rank, first, count, ranges]) =>
      this.row(rank, first, count, ranges === 1));
    this.ranks = [...new Set(this.rows.map((row) => row.rank))];
    this.byStart = Uint32Array.from({ length: this.count }, (_, i) => i)
      .sort((a, b) => this.start[a] - this.start[b]);
    this.counts = new Float64Array(this.ops.length);
    this.totals = new Float64Array(this.ops.length);
    for (let i = 0; i < this.count; i++) {
      this.counts[this.op[i]] += 1;
      this.totals[this.op[i]] += this.length[i];
    }
  }

  // A row's events do not overlap. Running sums tell how busy any stretch of it is at once.
  row(rank, first, count, ranges) {
    const busy = new Float64Array(count + 1);
    const waiting = new Float64Array(count + 1);
    for (let i = 0; i < count; i++) {
      busy[i + 1] = busy[i] + this.length[first + i];
      waiting[i + 1] = waiting[i] + Math.max(this.wait[first + i], 0);
    }
    return { rank, first, count, ranges, busy, waiting };
  }

  end(i) {
    return this.start[i] + this.length[i];
  }

  // The first event of a row that ends after a moment.
  endingAfter(row, moment) {
    let low = row.first, high = row.first + row.count;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (this.start[middle] + this.length[middle] > moment) high = middle;
      else low = middle + 1;
    }
    return low;
  }
  // The first that begins at or after a moment, not far from one that is known to be before it.
  nextStartingAt(row, moment, from) {
    const { start } = this;
    const end = row.first + row.count;
    let low = from, step = 1;
    while (low + step < end && start[low + step] < moment) {
      low += step;
      step *= 2;
    }
    let high = Math.min(low + step, end);
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (start[middle] >= moment) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  // How long a row was busy, and how much of that waiting, from its beginning until a moment; and
  // the first event after it, to go on from.
  until(row, moment, from = row.first) {
    const i = this.nextStartingAt(row, moment, from);
    const at = i - row.first;
    let busy = row.busy[at], waiting = row.waiting[at];
    if (at > 0) {
      const beyond = Math.max(this.end(i - 1) - moment, 0);
      const wait = Math.max(this.wait[i - 1], 0);
      busy -= beyond;
      waiting -= Math.max(0, Math.min(wait, beyond - (this.length[i - 1] - wait)));
    }
    return [busy, waiting, i];
  }

  at(row, moment, slack) {
    const i = this.endingAfter(row, moment - slack);
    if (i < row.first + row.count && this.start[i] <= moment + slack) return i;
    return -1;
  }

  isRange(i) {
    return this.op[i] === this.rangeOp;
  }
  isOver(i) {
    return this.state[i] !== STATES.waiting;
  }
  hasFailed(i) {
    return this.state[i] > STATES.done;
  }
  name(i) {
    return this.isRange(i) ? this.names[this.site[i]] : this.ops[this.op[i]];
  }
  place(i) {
    return this.isRange(i) ? "" : this.sites[this.site[i]][0];
  }

  // The others of a collective, or the other end of a message, and the event itself.
  companions(i) {
    const meeting = this.meeting[i];
    if (meeting >= 0) {
      return Array.from(
        this.members.subarray(this.meeting_at[meeting], this.meeting_at[meeting + 1]));
    }
    return this.partner[i] >= 0 ? [i, this.partner[i]] : [i];
  }
  isLast(i) {
    const meeting = this.meeting[i];
    return meeting >= 0 && this.last[meeting] === i && this.late[meeting] > 0;
  }

  // Events of which every word says something, in the order of time; null if nothing is asked for.
  search(query) {
    const words = query.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return null;
    const tests = words.map((word) => this.test(word));
    return this.byStart.filter((i) => tests.every((test) => test(i)));
  }
  test(word) {
    const numbered = /^#(\d+)$/.exec(word);
    if (numbered) return (i) => this.sequence[i] === Number(numbered[1]) && !this.isRange(i);
    const has = (text) => (text.toLowerCase().includes(word) ? 1 : 0);
    const ops = Uint8Array.from(this.ops, has);
    const sites = Uint8Array.from(this.sites, ([site, api]) => has(site) | has(api));
    const groups = Uint8Array.from(this.groups, ([name]) => has(name));
    const names = Uint8Array.from(this.names, has);
    return (i) =>
      this.isRange(i)
        ? names[this.site[i]]
        : ops[this.op[i]] | sites[this.site[i]] | groups[this.group[i]];
  }
}
