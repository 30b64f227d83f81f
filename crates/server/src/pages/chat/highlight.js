//! The colours of code.

import hljs from "./vendor/highlight.min.js";

/** Longer code stays plain, because colouring takes time. */
const MOST_CHARACTERS = 50_000;

/** Builds DOM nodes from the highlighter's output. The highlighter's own emitter would write HTML. */
class NodeEmitter {
  constructor() {
    this.root = document.createDocumentFragment();
    this.open = [this.root];
  }

  addText(text) {
    if (text) this.open.at(-1).append(text);
  }

  startScope(scope) {
    const node = document.createElement("span"), [first, ...rest] = scope.split(".");
    node.className = [`hljs-${first}`, ...rest.map((part, i) => part + "_".repeat(i + 1))].join(" ");
    this.open.at(-1).append(node);
    this.open.push(node);
  }

  endScope() {
    if (this.open.length > 1) this.open.pop();
  }

  openNode(scope) {
    this.startScope(scope);
  }

  closeNode() {
    this.endScope();
  }

  __addSublanguage(emitter) {
    this.open.at(-1).append(emitter.root);
  }

  finalize() {}

  toHTML() {
    return "";
  }
}

hljs.configure({ __emitter: NodeEmitter });

/** The code as a node, coloured if the language is known. */
export function highlight(code, language) {
  if (language && code.length <= MOST_CHARACTERS && hljs.getLanguage(language)) {
    const root = hljs.highlight(code, { language, ignoreIllegals: true })._emitter?.root;
    if (root?.textContent === code) {
      root.normalize();
      return root;
    }
  }
  return document.createTextNode(code);
}
