// Mouse, wheel and keys on the timeline.

class Hands {
  constructor(timeline) {
    this.timeline = timeline;
    this.held = null; // a drag: where it began and what it does
    const { canvas, overview } = timeline;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointercancel", () => (this.held = null));
    canvas.addEventListener("pointerleave", () => this.hover(-1, 0, 0));
    overview.canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    document.addEventListener("keydown", (event) => this.key(event));
  }

  wheel(event) {
    const { timeline } = this;
    if (event.offsetX < GUTTER) return; // scrolls through the ranks
    event.preventDefault();
    const unit = event.deltaMode === 1 ? 16 : event.deltaMode === 2 ? 400 : 1;
    const [dx, dy] = [event.deltaX * unit, event.deltaY * unit];
    if (event.shiftKey) timeline.pan(dx + dy);
    else if (Math.abs(dx) > Math.abs(dy)) timeline.pan(dx);
    else {
      const speed = event.ctrlKey ? 0.01 : 0.002;
      const by = Math.max(-0.7, Math.min(dy * speed, 0.7));
      timeline.zoom(Math.exp(by), event.target === timeline.canvas ? event.offsetX : undefined);
    }
    if (event.target === timeline.canvas) this.point(event);
  }

  press(event) {
    if (event.button !== 0) return;
    const { timeline } = this;
    timeline.lanes.focus({ preventScroll: true });
    timeline.canvas.setPointerCapture(event.pointerId);
    this.held = { x: event.offsetX, y: event.offsetY, moved: false, zooms: event.shiftKey };
    if (event.shiftKey) timeline.stretch = [0, 0].fill(timeline.moment(event.offsetX));
  }
  move(event) {
    const { timeline, held } = this;
    if (!held) return this.point(event);
    const [dx, dy] = [event.offsetX - held.x, event.offsetY - held.y];
    if (!held.moved && Math.hypot(dx, dy) < 4) return;
    held.moved = true;
    this.hover(-1, 0, 0);
    if (held.zooms) {
      timeline.stretch[1] = timeline.moment(event.offsetX);
      return timeline.redraw();
    }
    timeline.canvas.classList.add("held");
    timeline.pan(-dx);
    timeline.lanes.scrollTop -= dy;
    [held.x, held.y] = [event.offsetX, event.offsetY];
  }
  release(event) {
    const { timeline, held } = this;
    this.held = null;
    timeline.canvas.classList.remove("held");
    if (!held) return;
    if (held.zooms && held.moved) {
      const [from, to] = timeline.stretch.sort((a, b) => a - b);
      timeline.show(from, to, true);
    } else if (!held.moved) {
      timeline.select(timeline.hit(event.offsetX, event.offsetY));
    }
    timeline.stretch = null;
    timeline.redraw();
  }
  point(event) {
    const i = this.timeline.hit(event.offsetX, event.offsetY);
    this.hover(i, event.clientX, event.clientY);
  }
  hover(i, x, y) {
    const { timeline } = this;
    if (i !== timeline.hovered) {
      timeline.hovered = i;
      timeline.canvas.classList.toggle("on-event", i >= 0);
      timeline.redraw();
    }
    timeline.on.hover(i, x, y);
  }

  key(event) {
    const { timeline } = this;
    if (event.target.matches("input, dialog *") || event.metaKey || event.altKey || event.ctrlKey) {
      return;
    }
    const step = (timeline.width - GUTTER) * 0.15;
    const actions = {
      w: () => timeline.zoom(0.7), "+": () => timeline.zoom(0.7), "=": () => timeline.zoom(0.7),
      s: () => timeline.zoom(1 / 0.7), "-": () => timeline.zoom(1 / 0.7),
      a: () => timeline.pan(-step), ArrowLeft: () => timeline.pan(-step),
      d: () => timeline.pan(step), ArrowRight: () => timeline.pan(step),
      ArrowUp: () => (timeline.lanes.scrollTop -= 60),
      ArrowDown: () => (timeline.lanes.scrollTop += 60),
      0: () => timeline.fit(), f: () => timeline.fit(),
    };
    const action = actions[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!action) return;
    event.preventDefault();
    this.hover(-1, 0, 0);
    action();
  }
}
