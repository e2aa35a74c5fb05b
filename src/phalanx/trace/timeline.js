// The timeline: what part of the run is in view, and drawing it.

const GUTTER = 106;
const RULER = 30;
const SHORTEST = 200; // nanoseconds in view at the least
const NOTICEABLE = 4; // pixels by which a rank must be late to be marked

class Timeline {
  constructor(model, on) {
    this.model = model;
    this.on = on; // hover(event, x, y), select(event)
    this.canvas = document.getElementById("timeline");
    this.overview = new Overview(this);
    this.lanes = document.getElementById("lanes");
    this.hovered = this.selected = -1;
    this.lit = null; // which events are shown in full colour: all if null
    this.frame = 0;
    const slack = Math.max(model.length_ns * 0.015, 1000);
    this.limits = { start: -slack, end: model.length_ns + slack };
    this.view = { ...this.limits };
    this.meetings = Uint32Array.from({ length: model.last.length }, (_, k) => k)
      .sort((a, b) => model.start[model.last[a]] - model.start[model.last[b]]);
    this.longestLate = model.late.reduce((a, b) => Math.max(a, b), 0);
    this.restyle();
    new ResizeObserver(() => this.resize()).observe(document.getElementById("stage"));
    this.lanes.addEventListener("scroll", () => this.redraw());
    new Hands(this);
  }

  restyle() {
    this.paint = new Paint(this.model.ops);
    this.overview.forget();
    this.redraw();
  }

  resize() {
    const stage = document.getElementById("stage").getBoundingClientRect();
    this.width = Math.max(stage.width, GUTTER + 50);
    this.height = Math.max(stage.height - OVERVIEW, 100);
    this.arrange();
    this.overview.forget();
    this.redraw();
  }

  // Give each rank a lane, and each row of it a place; few ranks get taller rows.
  arrange() {
    const rows = this.model.rows;
    const operations = rows.filter((row) => !row.ranges).length;
    const ranges = rows.length - operations;
    const between = 18;
    const room = this.height - RULER - between * this.model.ranks.length - ranges * 20 - 12;
    const tall = Math.max(20, Math.min(60, room / Math.max(operations, 1)));
    let y = RULER;
    this.places = [];
    for (const rank of this.model.ranks) {
      const lane = { rank, top: y, rows: [] };
      y += between / 2;
      for (const row of rows.filter((each) => each.rank === rank)) {
        const height = row.ranges ? 20 : tall;
        lane.rows.push({ row, y, height: height - (row.ranges ? 2 : 3) });
        y += height;
      }
      y += between / 2;
      lane.bottom = y;
      this.places.push(lane);
    }
    this.total = y;
    this.inOrder = this.places.flatMap((lane) => lane.rows);
    document.getElementById("spacer").style.height = `${Math.max(y, this.height)}px`;
  }

  get span() {
    return this.view.end - this.view.start;
  }
  x(moment) {
    return GUTTER + ((moment - this.view.start) / this.span) * (this.width - GUTTER);
  }
  moment(x) {
    return this.view.start + ((x - GUTTER) / (this.width - GUTTER)) * this.span;
  }

  // Bring a stretch of time into view.
  show(start, end, smoothly = false) {
    const most = this.limits.end - this.limits.start;
    let span = Math.min(Math.max(end - start, SHORTEST), most);
    const middle = (start + end) / 2;
    start = Math.min(Math.max(middle - span / 2, this.limits.start), this.limits.end - span);
    const goal = { start, end: start + span };
    cancelAnimationFrame(this.moving);
    if (!smoothly || matchMedia("(prefers-reduced-motion: reduce)").matches) {
      this.view = goal;
      this.redraw();
      return;
    }
    const from = { ...this.view };
    const began = performance.now();
    const step = (now) => {
      const t = Math.min((now - began) / 220, 1);
      const eased = 1 - (1 - t) ** 3;
      this.view = {
        start: from.start + (goal.start - from.start) * eased,
        end: from.end + (goal.end - from.end) * eased,
      };
      if (t === 1) this.view = goal;
      this.redraw();
      if (t < 1) this.moving = requestAnimationFrame(step);
    };
    this.moving = requestAnimationFrame(step);
  }
  fit() {
    this.show(this.limits.start, this.limits.end, true);
  }
  zoom(factor, x = (GUTTER + this.width) / 2) {
    const at = this.moment(x);
    const most = this.limits.end - this.limits.start;
    const span = Math.min(Math.max(this.span * factor, SHORTEST), most);
    const start = at - ((x - GUTTER) / (this.width - GUTTER)) * span;
    this.show(start, start + span);
  }
  pan(pixels) {
    const by = (pixels / (this.width - GUTTER)) * this.span;
    this.show(this.view.start + by, this.view.end + by);
  }

  // Bring an event into view, large enough to be seen.
  reveal(i) {
    this.on.hover(-1, 0, 0);
    const { start, length } = this.model;
    const late = this.model.isLast(i) ? this.model.late[this.model.meeting[i]] : 0;
    const from = start[i] - late, whole = length[i] + late;
    const fits = whole * 12 > this.span && whole < this.span * 0.8;
    const span = fits ? this.span : Math.max(whole * 4, SHORTEST * 5);
    const middle = from + whole / 2;
    this.show(middle - span / 2, middle + span / 2, true);
    const place = this.placeOf(i);
    const top = place.y - this.lanes.scrollTop;
    if (top < RULER || top + place.height > this.height) {
      this.lanes.scrollTop = place.y - this.height / 2;
    }
  }
  select(i) {
    this.selected = i;
    this.on.select(i);
    this.redraw();
  }
  light(lit) {
    this.lit = lit;
    this.litBefore = null;
    if (lit) {
      this.litBefore = new Uint32Array(this.model.count + 1);
      for (let i = 0; i < lit.length; i++) this.litBefore[i + 1] = this.litBefore[i] + lit[i];
    }
    this.overview.forget();
    this.redraw();
  }

  placeOf(i) {
    let low = 0, high = this.inOrder.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >>> 1;
      if (this.inOrder[middle].row.first <= i) low = middle;
      else high = middle - 1;
    }
    return this.inOrder[low];
  }
  // Where an event is on the screen: the middle of what can be seen of it.
  locate(i) {
    const box = this.canvas.getBoundingClientRect();
    const place = this.placeOf(i);
    const left = Math.max(this.x(this.model.start[i]), GUTTER);
    const right = Math.min(this.x(this.model.end(i)), this.width);
    return {
      x: box.left + (left + right) / 2,
      y: box.top + place.y - this.lanes.scrollTop + place.height / 2,
    };
  }
  hit(x, y) {
    if (x < GUTTER || y < RULER) return -1;
    const down = y + this.lanes.scrollTop;
    const slack = (2 / (this.width - GUTTER)) * this.span;
    for (const lane of this.places) {
      if (down < lane.top || down > lane.bottom) continue;
      for (const place of lane.rows) {
        if (down < place.y || down > place.y + place.height) continue;
        const exact = this.model.at(place.row, this.moment(x), 0);
        return exact >= 0 ? exact : this.model.at(place.row, this.moment(x), slack);
      }
    }
    return -1;
  }

  redraw() {
    if (this.frame || !this.width) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      const began = performance.now();
      this.draw();
      this.overview.draw();
      this.frameTime = performance.now() - began;
      this.frames = (this.frames || 0) + 1;
    });
  }

  draw() {
    const context = sharpen(this.canvas, this.width, this.height);
    const { paint, width, height } = this;
    const scrolled = this.lanes.scrollTop;
    context.fillStyle = paint.ground;
    context.fillRect(0, 0, width, height);
    context.save();
    context.translate(0, -scrolled);
    const inView = (top, bottom) => bottom > scrolled && top < scrolled + height;
    const lanes = this.places.filter((lane) => inView(lane.top, lane.bottom));
    this.places.forEach((lane, i) => {
      if (!lanes.includes(lane) || i % 2) return;
      context.fillStyle = paint.lane;
      context.fillRect(0, lane.top, width, lane.bottom - lane.top);
    });
    this.drawGrid(context, scrolled);
    context.save();
    context.beginPath();
    context.rect(GUTTER, scrolled, width - GUTTER, height);
    context.clip();
    for (const lane of lanes) {
      for (const place of lane.rows) {
        if (inView(place.y, place.y + place.height)) this.drawRow(context, place);
      }
    }
    this.drawLate(context);
    for (const i of new Set([this.selected, this.hovered])) {
      if (i >= 0) this.drawCompanions(context, i, i === this.selected);
    }
    if (this.stretch) {
      const [from, to] = this.stretch.map((moment) => this.x(moment));
      context.fillStyle = paint.shade;
      context.fillRect(Math.min(from, to), scrolled, Math.abs(to - from), height);
    }
    context.restore();
    this.drawLabels(context, lanes);
    context.restore();
    this.drawRuler(context);
  }

  ticks() {
    const step = tickStep(this.span, (this.width - GUTTER) / 130);
    const moments = [];
    for (let at = Math.ceil(this.view.start / step) * step; at <= this.view.end; at += step) {
      moments.push(at);
    }
    return [step, moments];
  }
  drawGrid(context, scrolled) {
    context.fillStyle = this.paint.line;
    for (const at of this.ticks()[1]) {
      context.fillRect(Math.round(this.x(at)), scrolled, 1, this.height);
    }
  }
  drawRuler(context) {
    const { paint } = this;
    context.fillStyle = paint.ground;
    context.fillRect(0, 0, this.width, RULER - 1);
    context.fillStyle = paint.line;
    context.fillRect(0, RULER - 1, this.width, 1);
    context.font = paint.font;
    context.textBaseline = "middle";
    const [step, moments] = this.ticks();
    for (const at of moments) {
      const x = Math.round(this.x(at));
      if (x < GUTTER) continue;
      context.fillStyle = paint.line;
      context.fillRect(x, RULER - 7, 1, 7);
      context.fillStyle = paint.muted;
      context.fillText(moment(at, step, this.view.end), x + 5, RULER / 2);
    }
    context.fillStyle = paint.ground;
    context.fillRect(0, 0, GUTTER, RULER - 1);
    context.fillStyle = paint.faint;
    context.fillText(duration(this.span), 14, RULER / 2);
  }

  // Events too narrow to be seen are drawn as columns, of which the upper part is waiting.
  drawRow(context, { row, y, height }) {
    const { model, paint } = this;
    const end = row.first + row.count;
    let i = model.endingAfter(row, this.view.start);
    const perPixel = this.span / (this.width - GUTTER);
    while (i < end && model.start[i] < this.view.end) {
      const left = this.x(model.start[i]);
      const right = this.x(model.end(i));
      if (right - left >= 1.5) {
        this.drawEvent(context, i, left, right, y, height, row.ranges);
        i += 1;
        continue;
      }
      const pixel = Math.floor(left);
      const next = Math.max(model.nextStartingAt(row, this.moment(pixel + 1), i), i + 1);
      // A wide one that begins within this pixel is drawn on its own.
      const stop = next > i + 1 && this.x(model.end(next - 1)) - left > 2.5 ? next - 1 : next;
      const busy = row.busy[stop - row.first] - row.busy[i - row.first];
      const waiting = row.waiting[stop - row.first] - row.waiting[i - row.first];
      const op = model.op[this.longest(i, stop)];
      const upper = busy > 0 ? Math.round((waiting / busy) * height) : 0;
      const lit = !this.lit || this.litBefore[stop] > this.litBefore[i];
      const dense = 0.35 + 0.65 * Math.min(busy / perPixel, 1);
      context.globalAlpha = lit ? dense : dense * 0.14;
      if (upper > 0) {
        context.fillStyle = paint.pale[op];
        context.fillRect(pixel, y, 1, upper);
      }
      if (upper < height) {
        context.fillStyle = paint.solid[op];
        context.fillRect(pixel, y + upper, 1, height - upper);
      }
      context.globalAlpha = 1;
      i = stop;
    }
  }
  longest(from, to) {
    const { length } = this.model;
    let best = from;
    const stride = Math.max(1, (to - from) >> 3);
    for (let i = from; i < to; i += stride) if (length[i] > length[best]) best = i;
    return best;
  }

  drawEvent(context, i, left, right, y, height, isRange) {
    const { model, paint } = this;
    const op = model.op[i];
    const from = Math.max(left, GUTTER - 4), to = Math.min(right, this.width + 4);
    const gap = right - left > 6 ? 1 : 0; // neighbours stay apart
    const width = Math.max(to - from - gap, 1);
    const wait = Math.max(model.wait[i], 0);
    const turn = Math.min(Math.max(this.x(model.start[i] + wait), from), from + width);
    context.globalAlpha = !this.lit || this.lit[i] ? 1 : 0.14;
    context.save();
    if (width > 5) {
      context.beginPath();
      context.roundRect(from, y, width, height, 3);
      context.clip();
    }
    context.fillStyle = paint.pale[op];
    context.fillRect(from, y, turn - from, height);
    context.fillStyle = isRange ? paint.pale[op] : paint.solid[op];
    if (model.wait[i] < 0) context.globalAlpha *= 0.6; // how much of it was waiting is unknown
    context.fillRect(turn, y, from + width - turn, height);
    if (isRange) {
      context.fillStyle = paint.solid[op];
      context.fillRect(from, y, 2, height);
    }
    if (model.hasFailed(i) || (!model.isOver(i) && !isRange)) {
      context.fillStyle = paint.late;
      context.fillRect(from, y, width, 3);
    }
    context.restore();
    this.drawText(context, i, from, turn, from + width, y, height, isRange);
    context.globalAlpha = 1;
  }
  // The name stands on the larger of the two parts.
  drawText(context, i, from, turn, to, y, height, isRange) {
    const { model, paint } = this;
    if (height < 12 || to - from < 28) return;
    context.font = paint.font;
    context.textBaseline = "middle";
    const onPale = isRange || turn - from > to - turn;
    const [left, right] = isRange ? [from, to] : onPale ? [from, turn] : [turn, to];
    const room = right - left - 12;
    context.fillStyle = onPale ? paint.onPale : paint.onSolid;
    const bytes = model.bytes[i];
    const long = bytes > 0 ? `${model.name(i)}  ${size(bytes)}` : model.name(i);
    const text = room > 110 ? fitted(context, long, room) : fitted(context, model.name(i), room);
    if (text) context.fillText(text, Math.max(left, GUTTER) + 6, y + height / 2 + 0.5);
  }

  // How late the last rank of a collective came, where that is wide enough to be seen.
  drawLate(context) {
    const { model, paint, meetings } = this;
    const perNanosecond = (this.width - GUTTER) / this.span;
    let low = 0, high = meetings.length;
    while (low < high) {
      const middle = (low + high) >>> 1;
      if (model.start[model.last[meetings[middle]]] < this.view.start) low = middle + 1;
      else high = middle;
    }
    context.font = paint.font;
    context.textBaseline = "alphabetic";
    for (let k = low; k < meetings.length; k++) {
      const late = model.late[meetings[k]];
      const i = model.last[meetings[k]];
      if (model.start[i] - this.longestLate > this.view.end) break;
      const wide = late * perNanosecond;
      if (wide < NOTICEABLE || model.start[i] - late > this.view.end) continue;
      const place = this.placeOf(i);
      const x = this.x(model.start[i]);
      const y = place.y + place.height;
      const dim = this.lit && !this.lit[i];
      context.globalAlpha = dim ? 0.12 : Math.min(0.4 + wide / 60, 1);
      context.fillStyle = paint.late;
      const from = Math.max(x - wide, GUTTER - 2);
      context.fillRect(from, y - 2, x - from, 2);
      context.beginPath();
      context.moveTo(x - 5, place.y);
      context.lineTo(x + 1, place.y);
      context.lineTo(x + 1, place.y + 8);
      context.fill();
      context.fillRect(x - 1, place.y, 2, place.height);
      const text = wide > 70 ? `+${duration(late)}` : "";
      if (text && !dim && x > GUTTER + 70) {
        context.textAlign = "right";
        context.strokeStyle = paint.ground; // so that it can be read on an operation
        context.lineWidth = 3;
        context.lineJoin = "round";
        context.strokeText(text, x - 8, y - 6);
        context.fillText(text, x - 8, y - 6);
        context.textAlign = "left";
      }
    }
    context.globalAlpha = 1;
  }

  drawCompanions(context, i, selected) {
    const { model, paint } = this;
    const companions = model.companions(i);
    const boxes = companions.map((each) => {
      const place = this.placeOf(each);
      const left = this.x(model.start[each]);
      return { each, left, right: Math.max(this.x(model.end(each)), left + 2), ...place };
    });
    context.strokeStyle = context.fillStyle = paint.text;
    context.lineWidth = selected ? 2 : 1.5;
    for (const { left, right, y, height } of boxes) {
      const from = Math.max(left, GUTTER - 5), to = Math.min(right, this.width + 5);
      context.beginPath();
      context.roundRect(from - 1, y - 1, Math.max(to - from, 0) + 2, height + 2, 4);
      context.stroke();
    }
    if (boxes.length < 2) return;
    context.lineWidth = 1;
    if (model.meeting[i] >= 0) {
      if (!model.complete[model.meeting[i]]) return;
      const x = Math.round(this.x(model.start[model.last[model.meeting[i]]])) + 0.5;
      context.setLineDash([4, 3]);
      context.strokeStyle = paint.late;
      context.beginPath();
      context.moveTo(x, Math.min(...boxes.map((box) => box.y)) - 6);
      context.lineTo(x, Math.max(...boxes.map((box) => box.y + box.height)) + 6);
      context.stroke();
      context.setLineDash([]);
      return;
    }
    const isSend = (box) => model.name(box.each) === "send";
    const from = boxes.find(isSend), to = boxes.find((box) => !isSend(box));
    const [x0, y0] = [from.right, from.y + from.height / 2];
    const [x1, y1] = [to.right, to.y + to.height / 2];
    context.beginPath();
    context.moveTo(x0, y0);
    context.bezierCurveTo(x0 + 40, y0, x1 + 50, y1, x1 + 12, y1);
    context.stroke();
    context.beginPath();
    context.moveTo(x1 + 4, y1);
    context.lineTo(x1 + 12, y1 - 4);
    context.lineTo(x1 + 12, y1 + 4);
    context.fill();
  }

  drawLabels(context, lanes) {
    const { paint, model } = this;
    for (const lane of lanes) {
      const even = this.places.indexOf(lane) % 2 === 0;
      context.fillStyle = even ? paint.lane : paint.ground;
      context.fillRect(0, lane.top, GUTTER - 1, lane.bottom - lane.top);
      const facts = model.summary.ranks.find((each) => each.rank === lane.rank);
      const middle = (lane.top + lane.bottom) / 2;
      context.textBaseline = "middle";
      context.font = paint.strong;
      context.fillStyle = paint.text;
      const tall = lane.bottom - lane.top > 44;
      context.fillText(`rank ${lane.rank}`, 14, tall ? middle - 8 : middle);
      if (!tall || !facts) continue;
      context.font = paint.font;
      context.fillStyle = paint.muted;
      const share = facts.lost_seconds / (model.summary.seconds || 1);
      context.fillText(`${percent(share)} waiting`, 14, middle + 8);
    }
    context.fillStyle = paint.line;
    context.fillRect(GUTTER - 1, 0, 1, Math.max(this.total, this.height + this.lanes.scrollTop));
  }
}
