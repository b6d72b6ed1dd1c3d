// Pictures of layouts, and the matrix of traffic.
import { find, make, makeSvg, setText, showEmpty, showList } from "./dom.js";
import { bytes, shortLine } from "./units.js";

const COLORS = ["#a6cee3", "#b2df8a", "#fdbf6f", "#fb9a99", "#cab2d6", "#f2e37a", "#8dd3c7", "#fccde5", "#c9ced6", "#ccebc5"];
const SIDE = 72;
const SHOWN = 6;
const MOST_LABELS = 16;

export function showTensors(tensors) {
  showList(find("tensors"), tensors.slice(0, SHOWN), (each) => JSON.stringify([each.session, each.shape, each.dtype, each.layout, each.mesh, each.line]), makeTensor, updateTensor);
  showEmpty(find("tensors"), !tensors.length, "The workers hold no tensors.");
}

function makeTensor(tensor) {
  const shape = tensor.shape.join(" × ") || "scalar";
  const facts = make("div", { class: "facts" },
    make("div", {}, make("strong", { text: shape }), ` ${tensor.dtype}`),
    make("div", { class: "code", text: `[${tensor.layout}]`, title: `${tensor.layout} on ${tensor.mesh}` }),
    make("div"), make("div", { class: "quiet" }));
  return make("li", { title: `${shape} as [${tensor.layout}] on mesh ${tensor.mesh}` }, picture(tensor), facts);
}

function updateTensor(item, tensor) {
  const facts = item.lastChild.children;
  const copies = tensor.copies ? `, ${tensor.copies} copied` : "";
  const times = tensor.count > 1 ? `${tensor.count} × ` : "";
  setText(facts[2], `${times}${bytes(tensor.nbytes)} on ${workersOf(tensor.parts)}${copies}`);
  setText(facts[3], tensor.line ? shortLine(tensor.line) : "");
  facts[3].title = tensor.line;
}

function workersOf(parts) {
  return parts.length === 1 ? `worker ${parts[0].worker}` : `${parts.length} workers`;
}

// The tensor as a square of its first two dims that are cut; replicas lie behind each other.
function picture(tensor) {
  const svg = makeSvg("svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, role: "img" });
  const [down, across] = drawnDims(tensor);
  const places = new Map();
  for (const part of tensor.parts) {
    const key = JSON.stringify(part.intervals);
    if (!places.has(key)) places.set(key, []);
    places.get(key).push(part);
  }
  const owners = new Map(); // a part has the colour of the first worker that holds it
  for (const part of tensor.parts) if (!owners.has(part.part)) owners.set(part.part, part.worker);
  for (const holders of places.values()) {
    const [y, height] = share(holders[0].intervals, tensor.shape, down);
    const [x, width] = share(holders[0].intervals, tensor.shape, across);
    draw(svg, holders, { x: x * SIDE, y: y * SIDE, width: width * SIDE, height: height * SIDE }, owners, places.size);
  }
  return svg;
}

function draw(svg, holders, box, owners, places) {
  const depth = Math.min(holders.length - 1, 3);
  const step = Math.min(4, box.width / 10, box.height / 10);
  const isPartial = new Set(holders.map((part) => part.part)).size > 1;
  for (let layer = depth; layer >= 0; layer--) {
    const shift = layer * step;
    svg.append(makeSvg("rect", {
      class: isPartial ? "part reduced" : "part", fill: COLORS[owners.get(holders[layer].part) % COLORS.length], rx: 2,
      x: box.x + shift, y: box.y + (depth - layer) * step,
      width: Math.max(box.width - depth * step, 1), height: Math.max(box.height - depth * step, 1),
    }));
  }
  if (places > MOST_LABELS || box.height < 12 || box.width < 12) return;
  const names = holders.slice(0, 3).map((part) => part.worker).join(" ") + (holders.length > 3 ? "…" : "");
  const text = names.length * 7 <= box.width ? names : String(holders[0].worker);
  svg.append(makeSvg("text", {
    class: "part-text", x: box.x + (box.width - depth * step) / 2, y: box.y + (box.height + depth * step) / 2,
  }, text));
}

function drawnDims(tensor) {
  const dims = tensor.shape.map((_, dim) => dim);
  const isCut = (dim) => new Set(tensor.parts.map((part) => String(part.intervals[dim]))).size > 1;
  const first = [...dims.filter(isCut), ...dims.filter((dim) => !isCut(dim))].slice(0, 2).sort((one, other) => one - other);
  return [first[0], first[1]];
}

function share(intervals, shape, dim) {
  if (dim === undefined || !shape[dim]) return [0, 1];
  const [start, stop] = intervals[dim];
  return [start / shape[dim], (stop - start) / shape[dim]];
}

export class TrafficMatrix {
  constructor() {
    this.before = new Map();
    this.time = 0;
    this.workers = "";
  }

  show(traffic, numbers) {
    const now = performance.now(), passed = (now - this.time) / 1000;
    const totals = new Map(traffic.pairs.map((pair) => [`${pair.sender} ${pair.receiver}`, pair.nbytes]));
    const rates = new Map([...totals].map(([key, total]) => [key, this.time ? Math.max(0, total - (this.before.get(key) ?? total)) / passed : 0]));
    this.before = totals;
    this.time = now;
    const all = [...totals.values()].reduce((sum, total) => sum + total, 0);
    showEmpty(find("traffic"), !all, numbers.length === 1 ? "With one worker nothing is exchanged." : "The workers have not exchanged tensors.");
    setText(find("traffic-note"), all ? `row to column, ${bytes(all)} in all` : "");
    if (all) this.draw(numbers, totals, rates);
  }

  draw(numbers, totals, rates) {
    if (this.workers !== String(numbers)) this.layOut(numbers);
    const most = Math.max(1, ...rates.values());
    for (const [key, cell] of this.cells) {
      const rate = rates.get(key) || 0, total = totals.get(key) || 0;
      cell.rect.style.fill = rate ? `rgba(var(--cell), ${0.12 + 0.83 * Math.sqrt(rate / most)})` : "";
      if (cell.text) setText(cell.text, rate ? `${bytes(rate)}/s` : total ? "0" : "");
      const [sender, receiver] = key.split(" ");
      setText(cell.title, `worker ${sender} to worker ${receiver}: ${bytes(rate)} a second, ${bytes(total)} in all`);
    }
  }

  layOut(numbers) {
    this.workers = String(numbers);
    this.cells = new Map();
    const count = numbers.length, across = count <= 8 ? 72 : count <= 16 ? 26 : 9, down = count <= 8 ? 30 : across;
    const left = 30, top = 20, gap = count <= 16 ? 2 : 1;
    const svg = makeSvg("svg", { class: "matrix", viewBox: `0 0 ${left + count * across} ${top + count * down}`, width: `${(left + count * across) / 14}rem` });
    svg.style.width = `${Math.min((left + count * across) / 14, 42)}rem`;
    numbers.forEach((sender, row) => {
      if (count <= 16 || row % 8 === 0) {
        svg.append(makeSvg("text", { class: "axis", x: left / 2, y: top + (row + 0.5) * down }, String(sender)));
        svg.append(makeSvg("text", { class: "axis", x: left + (row + 0.5) * across, y: top / 2 }, String(sender)));
      }
      numbers.forEach((receiver, column) => {
        if (sender === receiver) return;
        const x = left + column * across, y = top + row * down, title = makeSvg("title");
        const rect = makeSvg("rect", { x, y, width: across - gap, height: down - gap, rx: count <= 16 ? 3 : 1 });
        rect.append(title);
        svg.append(rect);
        const text = count <= 8 ? makeSvg("text", { x: x + across / 2 - 1, y: y + down / 2 }) : null;
        if (text) svg.append(text);
        this.cells.set(`${sender} ${receiver}`, { rect, title, text });
      });
    });
    find("traffic").replaceChildren(svg);
  }
}
