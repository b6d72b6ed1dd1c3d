// Numbers as a person reads them.

const SIZES = [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]];

export function bytes(count) {
  for (const [unit, size] of SIZES) if (count >= size) return `${short(count / size)} ${unit}`;
  return `${Math.round(count)} B`;
}

export function count(number) {
  if (number >= 1e6) return `${short(number / 1e6)} M`;
  if (number >= 1e4) return `${short(number / 1e3)} k`;
  return Math.round(number).toLocaleString("en");
}

export function percent(share) {
  return `${Math.round(share * 100)} %`;
}

export function seconds(time) {
  if (time >= 100) return `${Math.round(time)} s`;
  if (time >= 1) return `${time.toFixed(1)} s`;
  return `${Math.max(1, Math.round(time * 1000))} ms`;
}

export function plural(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

export function opName(op) {
  return op.replace(/^aten\./, "").replace(/\.default$/, "");
}

export function shortLine(line) {
  return line.slice(line.lastIndexOf("/") + 1);
}

function short(number) {
  return number >= 100 ? number.toFixed(0) : number >= 10 ? number.toFixed(1) : number.toFixed(2);
}
