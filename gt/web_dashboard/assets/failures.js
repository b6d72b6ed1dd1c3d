// Failures, each with two tracebacks: where the op was issued, and where it failed.
import { find, make, setText, showList } from "./dom.js";
import { count, plural, shortLine } from "./units.js";

export function showFailures(record) {
  const code = new Map(record.code.map((each) => [each.line, each.code]));
  const entries = [
    ...record.lost.map((lost) => ({ key: `lost ${lost.worker}`, make: () => makeLost(lost) })),
    ...record.failures.map((failure) => ({ key: `failure ${failure.number}`, make: () => makeFailure(failure, code), failure })),
  ];
  find("failures").hidden = !entries.length;
  const counts = [record.count ? plural(record.count, "op") + " failed" : "", record.lost.length ? plural(record.lost.length, "worker") + " lost" : ""];
  setText(find("failure-count"), counts.filter(Boolean).join(", "));
  showList(find("failure-list"), entries, (each) => each.key, (each) => each.make(), (element, each) => {
    if (!each.failure) return;
    setText(element.where, place(each.failure.workers));
    setText(element.when, when(each.failure));
  });
}

function makeLost(lost) {
  return make("div", { class: "failure" }, make("strong", { text: `Worker ${lost.worker}` }),
    ` (process ${lost.pid}) ${lost.reason}. `, make("span", { class: "quiet", text: lost.last_op ? `Its last op was ${lost.last_op}.` : "It had run no op." }));
}

function makeFailure(failure, code) {
  const first = failure.message.split("\n", 1)[0];
  const time = make("span", { class: "quiet" });
  const summary = make("summary", {}, make("strong", { text: `${failure.kind}: ` }), `${first} `, time);
  const where = make("h3", { text: place(failure.workers) });
  const details = make("details", { class: "failure" }, summary, make("div", { class: "tracebacks" },
    make("div", {}, make("h3", { text: `Issued by session ${failure.session}` }), make("pre", { text: issued(failure, code) })),
    make("div", {}, where, make("pre", { text: failure.traceback || `${failure.kind}: ${failure.message}` }))));
  details.open = failure.number === 1;
  details.where = where;
  details.when = time;
  return details;
}

function when(failure) {
  const time = new Date(failure.time * 1000).toLocaleTimeString();
  const last = failure.times > 1 ? `${count(failure.times)} times, last at ${time}` : time;
  return `${failure.op}, ${shortLine(failure.line) || "no line"}, ${last}`;
}

function issued(failure, code) {
  const at = failure.line.lastIndexOf(":");
  const place = failure.line ? `File "${failure.line.slice(0, at)}", line ${failure.line.slice(at + 1)}` : "The line is not known.";
  const text = code.get(failure.line);
  return `${place}${text ? `\n    ${text}` : ""}\n\n${failure.op}(${failure.inputs.join(", ")})`;
}

function place(workers) {
  const names = workers.filter((worker) => worker >= 0);
  return names.length ? `Failed on worker${names.length > 1 ? "s" : ""} ${names.join(", ")}` : "Failed before it reached a worker";
}
