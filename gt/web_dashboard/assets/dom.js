// Builds the page. All text is set as text, never as markup: names of ops, paths and tracebacks may be anything.

export function find(id) {
  return document.getElementById(id);
}

export function make(tag, options = {}, ...children) {
  const element = document.createElement(tag);
  if (options.class) element.className = options.class;
  if (options.text !== undefined) element.textContent = options.text;
  if (options.title) element.title = options.title;
  element.append(...children);
  return element;
}

export function makeSvg(tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text) element.textContent = text;
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Shows records as the children of a parent: those of records that were shown before are used again.
export function showList(parent, records, keyOf, create, update) {
  const known = parent.shown || new Map();
  const shown = new Map();
  let position = parent.firstChild;
  for (const record of records) {
    const key = keyOf(record);
    const element = known.get(key) || create(record);
    update(element, record);
    shown.set(key, element);
    if (element === position) position = position.nextSibling;
    else parent.insertBefore(element, position);
  }
  for (const [key, element] of known) if (!shown.has(key)) element.remove();
  parent.shown = shown;
}

export function showEmpty(parent, isEmpty, text) {
  if (isEmpty && !parent.note) parent.after((parent.note = make("div", { class: "empty", text })));
  else if (!isEmpty && parent.note) parent.note = parent.note.remove();
  parent.hidden = isEmpty;
}

export function bar(record) {
  const fill = make("span");
  const item = make("li", {}, make("span", { class: "name" }), make("span", { class: "amount" }),
    make("span", { class: "bar" }, fill));
  item.fill = fill;
  return item;
}

export function setBar(item, name, place, amount, share, color) {
  const [label, number] = item.children;
  if (item.dataset.name !== name + place) {
    item.dataset.name = name + place;
    label.replaceChildren(make("span", { class: "code", text: name }), make("span", { class: "place", text: place }));
    label.title = `${name} ${place}`;
  }
  setText(number, amount);
  item.fill.style.width = `${Math.max(0, Math.min(1, share)) * 100}%`;
  if (color) item.fill.style.background = color;
}
