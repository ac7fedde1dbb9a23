// As much of a browser as the planner's page needs, for node: elements that remember what they were given.
"use strict";

class Element {
  constructor(name) {
    Object.assign(this, { name, attributes: {}, children: [], listeners: {}, hidden: false, value: "", parent: null });
    const change = (add) => (word) => this.setAttribute("class", [...this.words().filter((each) => each !== word), ...(add ? [word] : [])].join(" "));
    this.classList = { add: change(true), remove: change(false) };
  }
  words() { return (this.attributes.class || "").split(" ").filter(Boolean); }
  set className(text) { this.setAttribute("class", text); }
  setAttribute(key, value) {
    this.attributes[key] = String(value);
    if (key === "value") this.value = String(value);
  }
  append(...children) {
    for (const each of children) if (each instanceof Element) each.parent = this;
    this.children.push(...children);
    if (this.name === "select" && !this.value) this.value = this.all().find((each) => each.name === "option").textContent;
  }
  replaceChildren(...children) {
    this.children = [];
    this.append(...children);
  }
  set textContent(text) { this.children = [text]; }
  get textContent() { return this.children.map((each) => (each instanceof Element ? each.textContent : each)).join(""); }
  all() { return this.children.flatMap((each) => (each instanceof Element ? [each, ...each.all()] : [])); }
  addEventListener(name, does) { (this.listeners[name] ||= []).push(does); }
  dispatch(name) {
    for (const does of this.listeners[name] || []) does();
    if (this.parent && name === "input") this.parent.dispatch(name); // it bubbles
  }
}

const body = new Element("body");
const find = (id) => body.all().find((each) => each.attributes.id === id);
const document = {
  getElementById: find,
  createElement: (name) => new Element(name),
  createElementNS: (_, name) => new Element(name),
  querySelectorAll: (name) => body.all().filter((each) => each.words().includes(name.slice(1))),
};
const location = { hash: "" }, history = { replaceState: (_, __, address) => (location.hash = address) };

// The elements of page.html that have an id, and the page's code, which then runs
function open_page(html) {
  for (const [, name, id] of html.matchAll(/<(\w+)[^>]* id="([\w-]+)"/g)) {
    const element = new Element(name);
    element.setAttribute("id", id);
    body.append(element);
  }
  find("data").textContent = html.match(/<script id="data"[^>]*>(.*?)<\/script>/s)[1];
  const code = [...html.matchAll(/<script>(.*?)<\/script>/gs)].map((each) => each[1]).join("\n");
  new Function("document", "location", "history", "module", code)(document, location, history, undefined);
}

module.exports = { body, find, location, open_page };
