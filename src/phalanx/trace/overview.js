// The whole run at a glance: how much of the ranks' time goes into operations, and of that into
// waiting; and what part of it is in view.

const OVERVIEW = 56;

class Overview {
  constructor(timeline) {
    this.timeline = timeline;
    this.canvas = document.getElementById("overview");
    this.drawn = null; // what it looks like, but for the view
    this.grabbed = false;
    this.canvas.addEventListener("pointerdown", (event) => this.grab(event));
    this.canvas.addEventListener("pointermove", (event) => this.drag(event));
    this.canvas.addEventListener("pointerup", () => (this.grabbed = false));
  }

  // What was drawn holds no longer.
  forget() {
    this.drawn = null;
  }

  // Move what is in view, or go where nothing is in view yet.
  grab(event) {
    const { start, end } = this.timeline.view;
    this.canvas.setPointerCapture(event.pointerId);
    this.grabbed = true;
    const at = this.moment(event.offsetX);
    this.offset = at >= start && at <= end ? at - (start + end) / 2 : 0;
    this.drag(event);
  }
  drag(event) {
    if (!this.grabbed) return;
    const { timeline } = this;
    const middle = this.moment(event.offsetX) - this.offset;
    timeline.show(middle - timeline.span / 2, middle + timeline.span / 2);
  }
  moment(x) {
    const { limits, width } = this.timeline;
    return limits.start + ((x - GUTTER) / (width - GUTTER)) * (limits.end - limits.start);
  }

  draw() {
    const { paint, limits, width, view } = this.timeline;
    const context = sharpen(this.canvas, width, OVERVIEW);
    if (!this.drawn) this.drawAll();
    context.drawImage(this.drawn, 0, 0, width, OVERVIEW);
    const scale = (width - GUTTER) / (limits.end - limits.start);
    const left = GUTTER + (view.start - limits.start) * scale;
    const right = GUTTER + (view.end - limits.start) * scale;
    context.fillStyle = paint.shade;
    context.fillRect(GUTTER, 0, left - GUTTER, OVERVIEW);
    context.fillRect(right, 0, width - right, OVERVIEW);
    context.fillStyle = paint.muted;
    if (right - left < width - GUTTER - 2) {
      context.fillRect(Math.max(left - 1, GUTTER), 4, 2, OVERVIEW - 9);
      context.fillRect(Math.min(right - 1, width - 2), 4, 2, OVERVIEW - 9);
    }
    context.fillStyle = paint.line;
    context.fillRect(0, OVERVIEW - 1, width, 1);
    context.fillRect(GUTTER - 1, 0, 1, OVERVIEW);
  }

  // What does not change with the view.
  drawAll() {
    const { paint, width } = this.timeline;
    this.drawn = document.createElement("canvas");
    const context = sharpen(this.drawn, width, OVERVIEW);
    context.fillStyle = paint.ground;
    context.fillRect(0, 0, width, OVERVIEW);
    const bottom = OVERVIEW - 8, tall = bottom - 10;
    this.measure(Math.floor(width - GUTTER)).forEach(([busy, waiting, hit], k) => {
      const x = GUTTER + k;
      const all = busy * tall, wait = waiting * tall;
      context.fillStyle = paint.waiting;
      context.fillRect(x, bottom - all, 1, wait);
      context.fillStyle = paint.accent;
      context.fillRect(x, bottom - all + wait, 1, all - wait);
      if (!hit) return;
      context.fillStyle = paint.late;
      context.fillRect(x, bottom + 2, 1, 4);
    });
    context.font = paint.font;
    context.textBaseline = "middle";
    context.fillStyle = paint.muted;
    context.fillText("all ranks", 14, OVERVIEW / 2);
  }

  // For each column: the share of the ranks' time in operations, in waiting, and whether it has a
  // hit of the search.
  measure(columns) {
    const { model, limits, lit } = this.timeline;
    const per = (limits.end - limits.start) / columns;
    const shares = Array.from({ length: columns }, () => [0, 0, 0]);
    for (const row of model.rows.filter((each) => !each.ranges)) {
      let before = model.until(row, limits.start);
      for (let k = 0; k < columns; k++) {
        const now = model.until(row, limits.start + (k + 1) * per, before[2]);
        shares[k][0] += (now[0] - before[0]) / per / model.ranks.length;
        shares[k][1] += (now[1] - before[1]) / per / model.ranks.length;
        before = now;
      }
    }
    for (const share of shares) {
      if (share[0] <= 1) continue; // operations of one rank may overlap
      share[1] /= share[0];
      share[0] = 1;
    }
    for (let i = 0; lit && i < model.count; i++) {
      const k = Math.floor((model.start[i] - limits.start) / per);
      if (lit[i]) shares[Math.min(k, columns - 1)][2] = 1;
    }
    return shares;
  }
}
