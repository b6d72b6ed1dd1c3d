// Tables of workers and sessions, and lists with bars.
import { bar, find, make, setBar, setText, showEmpty, showList } from "./dom.js";
import { bytes, count, opName, percent, plural, seconds, shortLine } from "./units.js";

const WORKER_COLUMNS = [["worker"], ["state"], ["busy"], ["exchange", 1], ["ops/s", 1], ["memory", 1], ["in/s", 1], ["out/s", 1], ["op"], ["line"]];
const SESSION_COLUMNS = [["session"], ["process"], ["tensors", 1], ["memory", 1], ["queued", 1], ["unanswered", 1]];
const SHOWN = 6;

function body(table, columns) {
  if (!table.tBodies.length) {
    const names = columns.map(([name, isNumber]) => make("th", { text: name, class: isNumber ? "number" : "" }));
    table.append(make("thead", {}, make("tr", {}, ...names)), make("tbody"));
  }
  return table.tBodies[0];
}

function row(columns) {
  return make("tr", {}, ...columns.map(([, isNumber]) => make("td", { class: isNumber ? "number" : "" })));
}

function workerRow() {
  const line = row(WORKER_COLUMNS), cells = line.children;
  cells[1].append(make("span", { class: "state" }));
  cells[2].append(make("span", { class: "meter" }, make("span", { class: "busy" }), make("span", { class: "exchange" })), make("span"));
  for (const cell of [cells[8], cells[9]]) cell.className = "cut code";
  return line;
}

function describeState(worker) {
  if (worker.waits_for.length) {
    const names = worker.waits_for.slice(0, 3).join(", ") + (worker.waits_for.length > 3 ? ", …" : "");
    return `waits for ${names}` + (worker.seconds >= 0.1 ? ` (${seconds(worker.seconds)})` : "");
  }
  const isLong = ["running", "stopped"].includes(worker.state) && worker.seconds >= 1;
  return isLong ? `${worker.state} ${seconds(worker.seconds)}` : worker.state;
}

function updateWorker(line, worker) {
  const cells = line.children, state = cells[1].firstChild, [meter, share] = cells[2].children;
  setText(cells[0], `${worker.worker} ${worker.device}`);
  cells[0].title = `process ${worker.pid} of ${worker.host}`;
  state.className = `state ${worker.state}`;
  setText(state, describeState(worker));
  meter.children[0].style.width = percent(worker.busy).replace(" ", "");
  meter.children[1].style.width = percent(worker.exchanging).replace(" ", "");
  meter.title = `${percent(worker.busy)} computes, ${percent(worker.exchanging)} exchanges tensors or waits`;
  setText(share, percent(worker.busy));
  setText(cells[3], percent(worker.exchanging));
  setText(cells[4], count(worker.ops_per_second));
  setText(cells[5], bytes(worker.nbytes));
  if (worker.memory) cells[5].title = `of ${bytes(worker.memory)}`;
  setText(cells[6], bytes(worker.received_per_second));
  setText(cells[7], bytes(worker.sent_per_second));
  setText(cells[8], opName(worker.op));
  cells[8].title = worker.op;
  setText(cells[9], shortLine(worker.site));
  cells[9].title = worker.site;
}

function updateLost(line, lost) {
  const cells = line.children, state = cells[1].firstChild;
  setText(cells[0], `${lost.worker}`);
  cells[0].title = `process ${lost.pid}`;
  state.className = "state lost";
  setText(state, "lost");
  cells[2].colSpan = 8;
  for (const cell of [...cells].slice(3)) cell.hidden = true;
  setText(cells[2], `process ${lost.pid} ${lost.reason}`);
  line.title = `${lost.reason}; its last op was ${lost.last_op || "none"}`;
}

export function showWorkers(workers, lost) {
  const records = [...workers, ...lost.map((each) => ({ ...each, isLost: true }))];
  showList(body(find("workers"), WORKER_COLUMNS), records, (each) => `${each.isLost ? "lost" : "worker"} ${each.worker}`,
    workerRow, (line, each) => (each.isLost ? updateLost(line, each) : updateWorker(line, each)));
  showEmpty(find("workers"), !records.length, "No worker is connected. Workers of a server join with: python -m gt.worker");
  const running = workers.filter((each) => each.state === "running" || each.state === "exchanging").length;
  setText(find("worker-count"), workers.length ? `${running} of ${workers.length} at work` : "");
}

export function showTotals(status, memory) {
  const add = (field) => status.workers.reduce((sum, worker) => sum + worker[field], 0);
  const facts = [
    ["workers", String(status.workers.length)],
    ["busy", status.workers.length ? percent(add("busy") / status.workers.length) : "–"],
    ["ops/s", count(add("ops_per_second"))],
    ["memory", bytes(add("nbytes"))],
    ["traffic/s", bytes(add("received_per_second"))],
  ];
  const refused = Object.values(status.refused || {}).reduce((sum, number) => sum + number, 0);
  if (refused) facts.push(["refused", count(refused)]);
  if (memory?.dropped) facts.push(["dropped", count(memory.dropped)]);
  showList(find("totals"), facts, ([name]) => name, ([name]) => make("div", {}, make("dt", { text: name }), make("dd")),
    (element, [, value]) => setText(element.lastChild, value));
}

export function showSessions(sessions) {
  showList(body(find("sessions"), SESSION_COLUMNS), sessions, (each) => each.session, () => row(SESSION_COLUMNS), (line, each) => {
    const texts = [each.session, each.pid, count(each.tensors), bytes(each.nbytes), count(each.queued), count(each.requests)];
    texts.forEach((text, at) => setText(line.children[at], String(text)));
    line.title = `process ${each.pid} of ${each.host}`;
  });
  showEmpty(find("sessions"), !sessions.length, "No program is connected.");
}

export function showShares(timeline, code) {
  const shares = timeline.shares(), color = (kind) => timeline.color(kind);
  showList(find("mix"), shares.ops.slice(0, SHOWN), (each) => each.name, bar,
    (item, each) => setBar(item, opName(each.name), "", percent(each.share), each.share, color(each.kind)));
  showList(find("lines"), shares.lines.slice(0, SHOWN - 2), (each) => each.name, bar,
    (item, each) => setBar(item, code.get(each.name) || shortLine(each.name), code.get(each.name) ? shortLine(each.name) : "", percent(each.share), each.share, color(each.kind)));
  showEmpty(find("mix"), !shares.ops.length, "The workers are idle.");
  showEmpty(find("lines"), !shares.lines.length, "No line is at work.");
}

export function showMemory(memory, code) {
  const most = Math.max(1, ...memory.lines.map((each) => each.nbytes));
  showList(find("memory"), memory.lines.slice(0, 8), (each) => each.line, bar, (item, each) => {
    const text = code.get(each.line);
    const name = each.line ? text || shortLine(each.line) : "all other tensors";
    const place = each.line ? (text ? shortLine(each.line) : "") : "written before this page was opened, or small";
    item.title = plural(each.tensors, "tensor");
    setBar(item, name, place, bytes(each.nbytes), each.nbytes / most, each.line ? "" : "var(--quiet)");
  });
  showEmpty(find("memory"), !memory.lines.length, "The workers hold no tensors.");
  const copies = memory.copied ? `, copies ${bytes(memory.copied)}` : "";
  const dropped = memory.dropped ? `; ${count(memory.dropped)} of the program's batches dropped` : "";
  setText(find("memory-note"), `that wrote it last: ${bytes(memory.nbytes)}${copies}${dropped}`);
}
