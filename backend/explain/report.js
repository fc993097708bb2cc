"use strict";
// Pictures that move, what is pointed at, and regions that are chosen everywhere at once.

const STEP = 1.25, LEAST = 0.02, MOST = 4, LEGIBLE = 0.55, PAN = 60;
const pictures = [];

class Picture {
  constructor(figure) {
    this.figure = figure;
    this.svg = figure.querySelector("svg");
    this.view = this.svg.querySelector(".view");
    this.told = figure.querySelector(".told");
    this.chosen = figure.querySelector(".chosen");
    this.nodes = [...this.svg.querySelectorAll(".n")];
    [this.width, this.height] = this.svg.dataset.size.split(" ").map(Number);
    this.label = figure.dataset.label;
    this.reads = this.nodes.map(() => []);
    this.users = this.nodes.map(() => []);
    for (const edge of this.svg.querySelectorAll("[data-e]")) {
      const [from, to] = edge.dataset.e.split(" ").map(Number);
      this.reads[to].push([from, edge]);
      this.users[from].push([to, edge]);
    }
    this.moved = false;
    this.name();
    this.listen();
  }

  // The lines of the listing, which say what the nodes are.
  lines() {
    const pre = document.querySelector(`pre[data-key="${this.figure.dataset.key}"]`);
    return [...pre.querySelectorAll(".l")].map((line) => {
      const parts = [...line.childNodes].filter((part) => part.nodeName !== "A");
      return parts.map((part) => part.textContent).join("").trim();
    });
  }

  name() {
    this.texts = this.lines();
    this.svg.setAttribute("tabindex", "0");
    this.svg.setAttribute("role", "group");
    this.svg.setAttribute("aria-label", `${this.label}: ${this.nodes.length} nodes`);
    this.nodes.forEach((node, k) => {
      node.setAttribute("tabindex", "-1");
      node.setAttribute("role", node.dataset.r === undefined ? "img" : "button");
      node.setAttribute("aria-label", this.texts[k]);
    });
  }

  // ---- where it stands

  start() {
    this.svg.removeAttribute("viewBox");
    this.svg.classList.add("ready");
    const { width, height } = this.svg.getBoundingClientRect();
    if (!width) return;
    const whole = Math.min((width - 24) / this.width, (height - 24) / this.height);
    if (whole >= LEGIBLE) return this.fit();
    // What would be too small to read begins at the top.
    const scale = Math.min(1, Math.max(LEGIBLE, (width - 24) / this.width));
    this.put(scale, (width - this.width * scale) / 2, 12);
  }

  fit() {
    const { width, height } = this.svg.getBoundingClientRect();
    const scale = Math.min((width - 24) / this.width, (height - 24) / this.height, 1.2);
    this.put(scale, (width - this.width * scale) / 2, (height - this.height * scale) / 2);
  }

  put(scale, x, y) {
    this.moved = true;
    Object.assign(this, { scale, x, y });
    this.view.setAttribute("transform", `translate(${x} ${y}) scale(${scale})`);
  }

  zoom(factor, at) {
    const { width, height } = this.svg.getBoundingClientRect();
    const [cx, cy] = at || [width / 2, height / 2];
    const scale = Math.min(MOST, Math.max(LEAST, this.scale * factor)), by = scale / this.scale;
    this.put(scale, cx - (cx - this.x) * by, cy - (cy - this.y) * by);
  }

  pan(dx, dy) {
    this.put(this.scale, this.x + dx, this.y + dy);
  }

  place(node) {
    return node.getAttribute("transform").match(/-?\d+/g).map(Number);
  }

  // Moves some nodes to the middle, all of them if they fit at a legible size.
  center(nodes) {
    if (!nodes.length) return;
    const { width, height } = this.svg.getBoundingClientRect();
    const places = nodes.map((node) => this.place(node));
    const [xs, ys] = [0, 1].map((k) => places.map((place) => place[k]));
    const [left, right, top, bottom] =
      [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
    const all = Math.min(width / (right - left + 200), height / (bottom - top + 100));
    const scale = Math.min(1, Math.max(LEGIBLE, all));
    const y = all < LEGIBLE ? height / 3 - top * scale : height / 2 - ((top + bottom) / 2) * scale;
    this.put(scale, width / 2 - ((left + right) / 2) * scale, y);
  }

  // ---- what is pointed at

  tell(node) {
    for (const near of this.svg.querySelectorAll(".near")) near.classList.remove("near");
    this.told.textContent = node ? this.texts[node.dataset.i] : "";
    if (!node) return;
    for (const [other, edge] of [...this.reads[node.dataset.i], ...this.users[node.dataset.i]]) {
      edge.classList.add("near");
      this.nodes[other].classList.add("near");
    }
  }

  focus(node) {
    const { width, height } = this.svg.getBoundingClientRect();
    const [x, y] = this.place(node), at = [this.x + x * this.scale, this.y + y * this.scale];
    if (at[0] < 40 || at[0] > width - 40 || at[1] < 30 || at[1] > height - 30)
      this.put(this.scale, width / 2 - x * this.scale, height / 2 - y * this.scale);
    node.focus({ preventScroll: true });
  }

  // The node that an arrow leads to: what it reads, what reads it, or beside it in its layer.
  next(node, key) {
    const k = Number(node.dataset.i);
    if (key === "ArrowUp") return this.reads[k].length ? this.nodes[this.reads[k][0][0]] : null;
    if (key === "ArrowDown") return this.users[k].length ? this.nodes[this.users[k][0][0]] : null;
    const [x, y] = this.place(node), way = key === "ArrowLeft" ? -1 : 1;
    const beside = this.nodes.filter((other) => {
      const place = this.place(other);
      return Math.abs(place[1] - y) < 2 && (place[0] - x) * way > 0;
    });
    const far = (other) => Math.abs(this.place(other)[0] - x);
    return beside.sort((one, other) => far(one) - far(other))[0] || null;
  }

  // The node nearest to the middle of what is seen.
  middle() {
    const { width, height } = this.svg.getBoundingClientRect();
    const far = (node) => {
      const [x, y] = this.place(node);
      return Math.hypot(this.x + x * this.scale - width / 2, this.y + y * this.scale - height / 2);
    };
    return this.nodes.reduce((best, node) => (far(node) < far(best) ? node : best));
  }

  // ---- hands

  listen() {
    const svg = this.svg;
    svg.addEventListener("wheel", (event) => {
      event.preventDefault();
      const box = svg.getBoundingClientRect();
      this.zoom(Math.exp(-event.deltaY / 400), [event.clientX - box.left, event.clientY - box.top]);
    }, { passive: false });
    svg.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      this.drag = { x: event.clientX, y: event.clientY, far: 0, node: event.target.closest(".n") };
      svg.setPointerCapture(event.pointerId);
    });
    svg.addEventListener("pointermove", (event) => {
      if (!this.drag) return this.tell(event.target.closest(".n"));
      const dx = event.clientX - this.drag.x, dy = event.clientY - this.drag.y;
      Object.assign(this.drag, { x: event.clientX, y: event.clientY });
      this.drag.far += Math.abs(dx) + Math.abs(dy);
      this.pan(dx, dy);
    });
    svg.addEventListener("pointerup", () => {
      const { far, node } = this.drag || { far: 9 };
      this.drag = null;
      if (far < 5 && node) this.press(node);
    });
    svg.addEventListener("pointercancel", () => { this.drag = null; });
    svg.addEventListener("pointerleave", () => { if (!this.drag) this.tell(null); });
    svg.addEventListener("focusin", (event) => this.tell(event.target.closest(".n")));
    svg.addEventListener("keydown", (event) => this.key(event));
    for (const button of this.figure.querySelectorAll("[data-do]"))
      button.addEventListener("click", () => this.act(button.dataset.do));
  }

  act(what) {
    if (what === "in") this.zoom(STEP);
    else if (what === "out") this.zoom(1 / STEP);
    else this.fit();
  }

  press(node) {
    this.focus(node);
    this.tell(node);
    if (node.dataset.r !== undefined) choose(node.dataset.r, this);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const node = event.target.closest(".n");
    const does = { "+": "in", "=": "in", "-": "out", "0": "fit" }[event.key];
    const way = { ArrowLeft: [1, 0], ArrowRight: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
    if (does) this.act(does);
    else if (way[event.key] && node) {
      const next = this.next(node, event.key);
      if (next) this.focus(next);
    } else if (way[event.key]) this.pan(...way[event.key].map((part) => part * PAN));
    else if (event.key === "Enter" || event.key === " ") node ? this.press(node) : this.focus(this.middle());
    else if (event.key === "Escape" && node) this.svg.focus({ preventScroll: true });
    else return;
    event.preventDefault();
  }
}

// ---- regions

// Marks a region in tables, in pictures and beside its kernel, which is opened. by: the picture in
// which it was chosen, which stays where it is.
function choose(region, by) {
  for (const old of document.querySelectorAll(".now")) old.classList.remove("now");
  const marked = document.querySelectorAll(`[data-row="${region}"], .n[data-r="${region}"]`);
  for (const each of marked) each.classList.add("now");
  const details = document.getElementById(`region${region}`).closest("article").querySelector("details");
  details.open = true;
  for (const picture of pictures) {
    const nodes = picture.nodes.filter((node) => node.dataset.r === region);
    if (!nodes.length) continue;
    picture.figure.closest("details").open = true;
    if (!picture.moved) picture.start();
    if (picture !== by) picture.center(nodes);
  }
  for (const picture of pictures) picture.chosen.replaceChildren();
  if (by) tellOf(region, by);
}

// Below a picture: where else the region is.
function tellOf(region, picture) {
  const row = document.querySelector(`tr[data-row="${region}"]`);
  const places = [["table", row], ["kernel", document.getElementById(`region${region}`)]];
  picture.chosen.append(`region ${region}:`);
  for (const [name, place] of places) {
    const button = document.createElement("button");
    Object.assign(button, { type: "button", textContent: name });
    button.addEventListener("click", () => show(place));
    picture.chosen.append(" ", button);
  }
}

function show(place) {
  place.scrollIntoView({ block: "center" });
  const target = place.querySelector("a, button") || place;
  target.focus({ preventScroll: true });
}

function pictureOf(region) {
  return pictures.find((each) => each.nodes.some((node) => node.dataset.r === region));
}

// ---- lines of a region and of its kernel

function match(event) {
  const line = event.target.closest("[data-v]"), block = event.currentTarget;
  for (const old of block.querySelectorAll(".now")) old.classList.remove("now");
  if (!line || event.type === "pointerleave") return;
  for (const same of block.querySelectorAll(`[data-v="${line.dataset.v}"]`)) same.classList.add("now");
  for (const pre of block.querySelectorAll("pre")) if (!pre.contains(line)) bringIn(pre);
}

// Scrolls a text, and nothing around it, to what is marked in it, unless some of that is seen.
function bringIn(pre) {
  const box = pre.getBoundingClientRect();
  const tops = [...pre.querySelectorAll(".now")].map((mark) => mark.getBoundingClientRect().top);
  if (!tops.length || tops.some((top) => top >= box.top && top <= box.bottom - 20)) return;
  pre.scrollTop += tops[0] - box.top - box.height / 2;
}

for (const figure of document.querySelectorAll(".picture")) pictures.push(new Picture(figure));
for (const picture of pictures) if (picture.svg.getBoundingClientRect().width) picture.start();
for (const details of document.querySelectorAll("details.graph"))
  details.addEventListener("toggle", () => {
    for (const picture of pictures)
      if (details.contains(picture.figure) && details.open && !picture.moved) picture.start();
  });
for (const link of document.querySelectorAll("a[data-r], button[data-r]"))
  link.addEventListener("click", (event) => {
    choose(link.dataset.r);
    if (link.dataset.to !== "picture") return;
    event.preventDefault();
    const picture = pictureOf(link.dataset.r);
    if (picture) {
      picture.figure.scrollIntoView({ block: "center" });
      picture.svg.focus({ preventScroll: true });
    }
  });
for (const block of document.querySelectorAll(".matched")) {
  block.addEventListener("pointerover", match);
  block.addEventListener("pointerleave", match);
}
if (/^#region\d+$/.test(location.hash)) choose(location.hash.slice(7));
