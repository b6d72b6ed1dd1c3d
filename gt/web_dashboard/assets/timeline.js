// The live timeline: a lane for each worker, the present at the right edge.
import { find, make, setText } from "./dom.js";
import { opName, seconds } from "./units.js";

const SECONDS = 10;
const DELAY = 350; // milliseconds: the picture ends where spans are known
const SECOND = 1e9;
const [WORKER, START, END, KIND, OP, LINE] = [0, 1, 2, 3, 4, 5];

export class Timeline {
  constructor() {
    this.canvas = find("timeline");
    this.lanes = new Map();
    this.kinds = new Map();
    this.latest = 0; // nanoseconds of the program's clock
    this.arrived = 0; // milliseconds of this page's clock, when the latest part came
    this.isLive = false;
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.canvas.addEventListener("mousemove", (event) => this.point(event));
    this.canvas.addEventListener("mouseleave", () => (find("tip").hidden = true));
    requestAnimationFrame(() => this.animate());
  }

  setKinds(kinds) {
    for (const each of kinds) this.kinds.set(each.kind, each);
    find("legend").replaceChildren(...kinds.map((each) => {
      const patch = make("i");
      patch.style.background = this.color(each.kind);
      return make("li", {}, patch, each.meaning);
    }));
  }

  // Colours of a scheme, light or dark, are those of the style sheet.
  color(kind) {
    return kind === "idle" || kind === "wait" ? `var(--${kind})` : this.kinds.get(kind)?.color || "var(--quiet)";
  }

  add(part) {
    for (const span of part.ended) {
      const lane = this.lane(span[WORKER]);
      if (lane.current && lane.current[START] === span[START]) lane.current = null;
      lane.spans.push(span);
    }
    const present = new Set();
    for (const span of part.current) {
      present.add(span[WORKER]);
      this.lane(span[WORKER]).current = span;
    }
    const oldest = part.time - (SECONDS + 2) * SECOND;
    for (const [worker, lane] of this.lanes) {
      lane.spans = lane.spans.filter((span) => span[END] > oldest);
      if (!present.has(worker)) lane.current = null;
      if (!present.has(worker) && !lane.spans.length) this.lanes.delete(worker);
    }
    this.latest = part.time;
    this.arrived = performance.now();
    if (this.still.matches) this.draw();
  }

  clear() {
    this.lanes.clear();
  }

  lane(worker) {
    if (!this.lanes.has(worker)) {
      this.lanes.set(worker, { spans: [], current: null });
      this.lanes = new Map([...this.lanes].sort((one, other) => one[0] - other[0]));
    }
    return this.lanes.get(worker);
  }

  spansOf(lane) {
    return lane.current ? [...lane.spans, lane.current] : lane.spans;
  }

  // The time of workers by op and by line, without the time in which they were idle.
  shares() {
    const ops = new Map(), lines = new Map();
    let total = 0;
    const from = this.latest - SECONDS * SECOND;
    for (const lane of this.lanes.values()) {
      for (const span of this.spansOf(lane)) {
        const time = span[END] - Math.max(span[START], from);
        if (span[KIND] === "idle" || time <= 0) continue;
        total += time;
        addTo(ops, span[KIND] === "wait" ? "waits for a worker" : span[OP] || "other work", time, span[KIND]);
        if (span[LINE]) addTo(lines, span[LINE], time, span[KIND]);
      }
    }
    return { ops: ranked(ops, total), lines: ranked(lines, total) };
  }

  animate() {
    if (!this.still.matches && !document.hidden) this.draw();
    setTimeout(() => requestAnimationFrame(() => this.animate()), 40);
  }

  present() {
    const passed = this.isLive ? Math.min(performance.now() - this.arrived, 1000) : DELAY;
    return this.latest + (passed - DELAY) * 1e6;
  }

  draw() {
    const canvas = this.canvas, scale = window.devicePixelRatio || 1;
    const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
    const count = Math.max(this.lanes.size, 1);
    const pitch = Math.max(rem * (count <= 2 ? 3.4 : count <= 4 ? 2.5 : count <= 8 ? 1.75 : count <= 16 ? 1.15 : count <= 32 ? 0.62 : 0.42), 6);
    const bar = pitch - Math.max(Math.round(pitch * 0.16), 1);
    const width = canvas.clientWidth, height = count * pitch + rem * 1.5;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    const style = getComputedStyle(document.documentElement);
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const place = (this.place = { left: rem * 5.2, right: width, pitch, bar, to: this.present() });
    place.from = place.to - SECONDS * SECOND;
    if (this.lanes.size) this.drawAxis(context, style, rem, height);
    let row = 0;
    for (const [worker, lane] of this.lanes) this.drawLane(context, style, rem, worker, lane, row++);
    if (!this.lanes.size) {
      context.fillStyle = style.getPropertyValue("--quiet");
      context.font = `${rem}px system-ui, sans-serif`;
      context.textAlign = "left";
      context.fillText("No worker is connected.", 0, pitch / 2);
    }
  }

  drawAxis(context, style, rem, height) {
    const place = this.place;
    context.font = `${rem * 0.8}px system-ui, sans-serif`;
    context.textBaseline = "alphabetic";
    for (let ago = 0; ago <= SECONDS; ago += 2) {
      const x = this.x(place.to - ago * SECOND);
      context.fillStyle = style.getPropertyValue("--quiet");
      context.textAlign = ago === 0 ? "right" : ago === SECONDS ? "left" : "center";
      context.fillText(ago === 0 ? "now" : `${ago} s ago`, x, height - rem * 0.25);
      context.fillStyle = style.getPropertyValue("--line");
      context.fillRect(x - 0.5, 0, 1, height - rem * 1.3);
    }
  }

  drawLane(context, style, rem, worker, lane, row) {
    const { left, right, pitch, bar, from, to } = this.place;
    const y = row * pitch;
    if (pitch >= rem * 0.9 || row % 8 === 0) {
      context.fillStyle = style.getPropertyValue("--quiet");
      const size = Math.min(rem, Math.max(bar, rem * 0.75));
      context.font = `${size}px system-ui, sans-serif`;
      context.textAlign = "left";
      context.textBaseline = "middle";
      context.fillText(`worker ${worker}`, 0, Math.max(y + bar / 2, size / 2));
    }
    context.fillStyle = style.getPropertyValue("--idle");
    context.fillRect(left, y, right - left, bar);
    for (const span of this.spansOf(lane)) {
      if (span[END] < from || span[START] > to || span[KIND] === "idle") continue;
      const start = Math.max(this.x(span[START]), left), end = Math.min(this.x(span[END]), right);
      const width = Math.max(end - start, 0.75);
      context.fillStyle = span[KIND] === "wait" ? style.getPropertyValue("--wait") : this.kinds.get(span[KIND])?.color || "#9aa3ad";
      context.fillRect(start, y, width, bar);
      const name = opName(span[OP]);
      if (bar >= rem * 0.95 && width > name.length * rem * 0.55 + rem) {
        context.fillStyle = span[KIND] === "wait" ? style.getPropertyValue("--ink") : span[KIND] === "creation" ? "#1b2129" : "#ffffff";
        context.font = `${rem * 0.85}px system-ui, sans-serif`;
        context.textAlign = "center";
        context.textBaseline = "middle";
        context.fillText(name, start + width / 2, y + bar / 2);
      }
    }
  }

  x(time) {
    const { left, right, from, to } = this.place;
    return left + ((time - from) / (to - from)) * (right - left);
  }

  point(event) {
    const tip = find("tip"), place = this.place;
    if (!place) return;
    const lane = [...this.lanes][Math.floor(event.offsetY / place.pitch)];
    const time = place.from + ((event.offsetX - place.left) / (place.right - place.left)) * (place.to - place.from);
    const span = lane && this.spansOf(lane[1]).find((each) => each[START] <= time && time < each[END]);
    tip.hidden = !span || event.offsetX < place.left;
    if (tip.hidden) return;
    const meaning = this.kinds.get(span[KIND])?.meaning || span[KIND];
    const facts = [`worker ${span[WORKER]}: ${meaning}, ${seconds((span[END] - span[START]) / SECOND)}`, span[OP], span[LINE]];
    setText(tip, facts.filter(Boolean).join("\n"));
    const isRight = event.offsetX > this.canvas.clientWidth / 2;
    tip.style.left = isRight ? "auto" : `${event.offsetX + 14}px`;
    tip.style.right = isRight ? `${this.canvas.clientWidth - event.offsetX + 14}px` : "auto";
    tip.style.top = `${event.offsetY + 14}px`;
  }
}

function addTo(table, name, time, kind) {
  const entry = table.get(name) || { name, time: 0, kinds: new Map() };
  entry.time += time;
  entry.kinds.set(kind, (entry.kinds.get(kind) || 0) + time);
  table.set(name, entry);
}

function ranked(table, total) {
  return [...table.values()].sort((one, other) => other.time - one.time).map((entry) => ({
    name: entry.name,
    share: entry.time / total,
    kind: [...entry.kinds].sort((one, other) => other[1] - one[1])[0][0],
  }));
}

