// Follows the program by server-sent events, and shows what they tell.
import { find, setText } from "./dom.js";
import { showFailures } from "./failures.js";
import { showMemory, showSessions, showShares, showTotals, showWorkers } from "./panels.js";
import { showTensors, TrafficMatrix } from "./pictures.js";
import { Timeline } from "./timeline.js";

const RETRY = 2000; // milliseconds
const timeline = new Timeline();
const matrix = new TrafficMatrix();
const code = new Map();
const last = { status: null, memory: null, lost: [] };
let hasEnded = false;

const actions = {
  status(record) {
    last.status = record;
    learn(record.code);
    showWorkers(record.workers, last.lost);
    showTotals(record, last.memory);
    showShares(timeline, code);
    const viewers = record.viewers > 1 ? `, ${record.viewers} viewers` : "";
    setText(find("timeline-note"), `last 10 s${viewers}`);
  },
  sessions: (record) => showSessions(record.sessions),
  memory(record) {
    last.memory = record;
    learn(record.code);
    showMemory(record, code);
  },
  tensors: (record) => showTensors(record.tensors),
  traffic: (record) => matrix.show(record, (last.status?.workers || []).map((worker) => worker.worker)),
  failures(record) {
    last.lost = record.lost;
    showFailures(record);
    if (last.status) showWorkers(last.status.workers, record.lost);
  },
  timeline: (record) => timeline.add(record),
};

function learn(lines) {
  for (const each of lines) if (each.code) code.set(each.line, each.code);
}

function say(state, text, banner) {
  const place = find("connection");
  place.className = `connection ${state}`;
  setText(place, text);
  timeline.isLive = state === "live";
  document.title = state === "live" ? "GT dashboard" : `${text} – GT dashboard`;
  find("banner").hidden = !banner;
  setText(find("banner"), banner);
}

function follow() {
  const source = new EventSource("/events");
  source.addEventListener("open", () => {
    if (hasEnded || timeline.latest) timeline.clear();
    hasEnded = false;
    showProgram();
    say("live", "live", "");
  });
  for (const [name, act] of Object.entries(actions)) {
    source.addEventListener(name, (event) => act(JSON.parse(event.data)));
  }
  source.addEventListener("ended", () => {
    hasEnded = true;
    say("lost", "ended", "The program has ended. What you see is its last state.");
    source.close();
    setTimeout(follow, RETRY);
  });
  source.addEventListener("error", () => {
    if (!hasEnded) say("lost", "no connection", "There is no connection to the program: it has ended, or it is stopped. Trying again…");
    source.close();
    setTimeout(follow, RETRY);
  });
}

async function showProgram() {
  const answer = await fetch("/api/program.json");
  if (!answer.ok) return;
  const program = await answer.json();
  setText(find("command"), program.command);
  find("command").title = program.command;
  setText(find("process"), `process ${program.pid}, GT ${program.version}`);
  timeline.setKinds(program.kinds);
}

follow();
