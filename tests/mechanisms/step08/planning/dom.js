// As much of a browser as the planner's page needs, for node: elements that remember what they were given.
"use strict";

class Element {
  constructor(name) {
    Object.assign(this, { name, attributes: {}, children: [], listeners: {}, hidden: false, value: "" });
  }
  set className(text) { this.setAttribute("class", text); }
  get className() { return this.attributes.class; }
  setAttribute(key, value) { this.attributes[key] = String(value); }
  getAttribute(key) { return this.attributes[key]; }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; }
  set textContent(text) { this.children = [text]; }
  get textContent() { return this.children.map((each) => (each instanceof Element ? each.textContent : each)).join(""); }
  all() { return this.children.flatMap((each) => (each instanceof Element ? [each, ...each.all()] : [])); }
  querySelectorAll(name) { return this.all().filter((each) => each.name === name); }
  addEventListener(name, does) { (this.listeners[name] ||= []).push(does); }
  dispatchEvent({ type }) { for (const does of this.listeners[type] || []) does(); }
}

// Open a page at an address, run its code, then `clicks` as a script of the page; returns what that returns
function open_page(html, hash, clicks) {
  const body = new Element("body");
  for (const [, name, id] of html.matchAll(/<(\w+)[^>]* id="([\w-]+)"/g)) {
    const element = new Element(name);
    element.setAttribute("id", id);
    body.append(element);
  }
  const find = (id) => body.all().find((each) => each.attributes.id === id);
  const document = { getElementById: find, createElement: (name) => new Element(name) };
  const location = { hash }, history = { replaceState: (_, __, address) => (location.hash = address) };
  find("data").textContent = html.match(/<script id="data"[^>]*>(.*?)<\/script>/s)[1];
  const code = [...html.matchAll(/<script>(.*?)<\/script>/gs)].map((each) => each[1]);
  return new Function("document", "location", "history", [...code, clicks].join("\n"))(document, location, history);
}

module.exports = { open_page };
