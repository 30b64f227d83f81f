//! Markdown as DOM nodes.
//!
//! No text is ever parsed as HTML. Each token of the parser becomes one of the elements that this file creates, and everything
//! else becomes a text node. An answer therefore cannot run a script, load a file or show a form, and the page's policy forbids
//! every conversion of text to HTML.

import { Marked } from "./vendor/marked.esm.js";
import { highlight } from "./highlight.js";
import { element, icon } from "./elements.js";

/** Formulas are shown as they are written. Their underscores and asterisks do not mark emphasis. */
const MATH = {
  // A displayed formula ends at its closing mark or, if that is missing, at a blank line.
  block: /^ {0,3}(?:\$\$(?:(?!\n[^\S\n]*\n)[^])+?\$\$|\\\[(?:(?!\n[^\S\n]*\n)[^])+?\\\])[^\S\n]*(?:\n|$)|^ {0,3}(?:\$\$|\\\[)[^\S\n]*\n(?:(?!\n[^\S\n]*\n)[^])+/,
  inline: /^(?:\$\$(?:[^$\n]|\n(?!\n))+\$\$|\\\((?:[^\n]|\n(?!\n))+?\\\)|\\\[(?:[^\n]|\n(?!\n))+?\\\]|\$(?!\s)(?:\\.|[^\\$\n])*?[^\s\\$]\$(?!\d))/,
};

const mathToken = (name, rule) => (src) => {
  const raw = rule.exec(src)?.[0];
  return raw && { type: name, raw, text: raw.trim() };
};

const parser = new Marked({
  gfm: true,
  breaks: true,
  extensions: [
    { name: "math", level: "block", start: (src) => src.match(/(?<=^|\n) {0,3}(?:\$\$|\\\[)/)?.index, tokenizer: mathToken("math", MATH.block) },
    { name: "formula", level: "inline", start: (src) => src.match(/\$|\\[([]/)?.index, tokenizer: mathToken("formula", MATH.inline) },
  ],
});

/** The parser's tokens. A text that it cannot parse, such as thousands of nested quotes, becomes a single paragraph. */
function parse(text) {
  try {
    return parser.lexer(text);
  } catch {
    return [{ type: "html", raw: text, text }];
  }
}

// ----------------------------------------------------------------------------------------------- inline elements

/** HTML elements that an answer may use inside a line, without attributes. */
const INLINE_HTML = new Set(["b", "del", "em", "i", "kbd", "mark", "s", "strong", "sub", "sup", "u"]);

const ENTITIES = {
  amp: "&", apos: "'", bull: "•", copy: "©", deg: "°", divide: "÷", emsp: "\u2003", ensp: "\u2002", euro: "€", ge: "≥", gt: ">", harr: "↔",
  hellip: "…", laquo: "«", larr: "←", ldquo: "“", le: "≤", lsquo: "‘", lt: "<", mdash: "—", micro: "µ", middot: "·", minus: "−", nbsp: "\u00a0",
  ndash: "–", ne: "≠", para: "¶", plusmn: "±", pound: "£", quot: '"', raquo: "»", rarr: "→", rdquo: "”", reg: "®", rsquo: "’", sect: "§",
  thinsp: "\u2009", times: "×", trade: "™", yen: "¥",
};

/** A text with its character references decoded. */
function decode(text) {
  return text.replace(/&(?:#(\d{1,7})|#[xX]([\da-fA-F]{1,6})|([a-z]+));/g, (whole, decimal, hex, name) => {
    if (name) return ENTITIES[name] ?? whole;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff) ? String.fromCodePoint(code) : "\ufffd";
  });
}

/** An address that may be opened, or null. Relative addresses are refused, because they would point to this server. */
function address(href) {
  try {
    const url = new URL(decode(href));
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

/** A link, or its source if its address may not be opened. An image becomes a link too: loading it would reveal the chat to its host. */
function link(token) {
  const href = address(token.href);
  if (!href) return document.createTextNode(token.raw);
  const node = element("a");
  node.href = href;
  node.title = href;
  node.target = "_blank";
  node.rel = "noopener noreferrer nofollow";
  inline(node, token.tokens ?? []);
  if (!node.textContent.trim()) node.textContent = href;
  return node;
}

/** Appends inline tokens to a node. */
function inline(parent, tokens) {
  const open = [parent];
  tokens.forEach((token, i) => {
    const top = open.at(-1);
    const [tag, slash, name] = (token.type === "html" && /^<(\/?)([a-z]+)\s*>$/.exec(token.raw.toLowerCase())) || [];
    if (tag && !slash && INLINE_HTML.has(name) && closes(tokens, i, name)) {
      open.push(element(name));
      top.append(open.at(-1));
    } else if (slash && open.length > 1 && top.localName === name) {
      open.pop();
    } else {
      top.append(inlineNode(token));
    }
  });
}

const closes = (tokens, from, name) => tokens.slice(from + 1).some((token) => token.type === "html" && token.raw.toLowerCase() === `</${name}>`);

function inlineNode(token) {
  switch (token.type) {
    case "strong": case "em": case "del": {
      const node = element(token.type);
      inline(node, token.tokens);
      return node;
    }
    case "codespan": return element("code", "", token.text);
    case "br": return element("br");
    case "link": case "image": return link(token);
    case "formula": return element("span", "math", token.text);
    case "checkbox": return checkbox(token.checked);
    case "escape": return document.createTextNode(token.text);
    case "html": return /^<br\s*\/?>$/i.test(token.raw) ? element("br") : document.createTextNode(token.raw);
    default: {
      if (!token.tokens) return document.createTextNode(decode(token.text ?? token.raw));
      const node = document.createDocumentFragment();
      inline(node, token.tokens);
      return node;
    }
  }
}

function checkbox(checked) {
  const node = element("span", "task", checked ? "☑" : "☐");
  node.setAttribute("role", "img");
  node.setAttribute("aria-label", checked ? "Done:" : "To do:");
  return node;
}

// ------------------------------------------------------------------------------------------------ block elements

/** The nodes of block tokens. */
const blocks = (tokens) => tokens.map(blockNode).filter(Boolean);

function blockNode(token) {
  switch (token.type) {
    case "space": case "def": return null;
    // The page itself has headings of the first two levels.
    case "heading": return withInline(`h${Math.min(token.depth + 2, 6)}`, token);
    case "paragraph": return withInline("p", token);
    case "code": return code(token);
    case "blockquote": return withBlocks("blockquote", token);
    case "list": return list(token);
    case "table": return table(token);
    case "hr": return element("hr");
    case "math": return element("div", "math", token.text);
    case "html": return element("p", "source", token.text.trimEnd());
    case "text": case "checkbox": return inlineNode(token);
    default: return element("p", "source", token.raw);
  }
}

function withInline(tag, token) {
  const node = element(tag);
  inline(node, token.tokens);
  return node;
}

function withBlocks(tag, token) {
  const node = element(tag);
  node.append(...blocks(token.tokens));
  return node;
}

function list(token) {
  const node = element(token.ordered ? "ol" : "ul");
  if (token.ordered && token.start !== 1) node.start = token.start;
  for (const item of token.items) {
    const entry = withBlocks("li", item);
    if (item.task) entry.className = "todo";
    node.append(entry);
  }
  return node;
}

function table(token) {
  const frame = element("div", "table"), node = element("table"), head = element("thead"), body = element("tbody");
  const row = (cells, tag) => {
    const line = element("tr");
    cells.forEach((cell, i) => {
      const entry = withInline(tag, cell);
      if (token.align[i]) entry.className = token.align[i];
      line.append(entry);
    });
    return line;
  };
  head.append(row(token.header, "th"));
  body.append(...token.rows.map((cells) => row(cells, "td")));
  node.append(head, body);
  frame.append(node);
  // The keyboard can reach and scroll a table that is too wide.
  frame.tabIndex = 0;
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", "Table");
  return frame;
}

/** Code with its language and a button that copies it, or null if the block is empty. */
function code(token) {
  if (!token.text) return null;
  const language = token.lang?.match(/^[^\s{,:]+/)?.[0] ?? "";
  const node = element("figure", "code"), bar = element("figcaption"), copy = element("button", "copy");
  const block = element("pre"), content = element("code");
  copy.type = "button";
  copy.append(icon("copy"), element("span", "", "Copy"));
  bar.append(element("span", "language", language || "text"), copy);
  block.tabIndex = 0;
  content.append(highlight(token.text, language));
  block.append(content);
  node.append(bar, block);
  return node;
}

// ----------------------------------------------------------------------------------------------------- streaming

/** Makes `old` equal to `fresh` and returns the resulting node. Unchanged nodes stay, with their scroll position and selection. */
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(fresh);
    return fresh;
  }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return old;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  // A button may be showing that it has just copied.
  if (old.localName !== "button") morphChildren(old, [...fresh.childNodes]);
  return old;
}

function morphChildren(parent, fresh, from = 0) {
  fresh.forEach((node, i) => {
    const old = parent.childNodes[from + i];
    old ? morph(old, node) : parent.append(node);
  });
  while (parent.childNodes.length > from + fresh.length) parent.lastChild.remove();
}

/** The beginning of a fence at the end of a text. */
const HALF_FENCE = /(?:^|\n) {0,3}(?:`{1,2}|~{1,2})$/;

/**
 * Shows a growing text in a node.
 *
 * Each call parses only the blocks that may still change, which are the last two: later text never changes a block that two
 * others follow. `onBlock` is called once with each node that is complete.
 */
export class Markdown {
  constructor(node, onBlock = () => {}) {
    this.node = node;
    this.onBlock = onBlock;
    this.reset();
  }

  reset() {
    this.node.replaceChildren();
    this.done = ""; // The text of the complete blocks.
    this.count = 0; // The number of their nodes.
    this.told = 0; // The number of nodes that `onBlock` received.
  }

  /** Shows `text`. `complete` says that no more text will follow. */
  show(text, complete) {
    text = text.replace(/\r\n?/g, "\n").trimEnd();
    if (!text.startsWith(this.done)) this.reset();
    if (complete) return this.finish(text);
    const tokens = parse(text.slice(this.done.length).replace(HALF_FENCE, ""));
    const entries = tokens.map((token) => ({ raw: token.raw, node: blockNode(token) }));
    morphChildren(this.node, entries.map((entry) => entry.node).filter(Boolean), this.count);
    const visible = entries.filter((entry) => entry.node);
    const keep = visible.at(-2);
    for (const { raw, node } of entries.slice(0, keep ? entries.indexOf(keep) : 0)) {
      // The parser's pieces add up to the text. If they did not, the rest would be parsed each time and still be right.
      if (!text.startsWith(raw, this.done.length)) break;
      this.done += raw;
      if (node) this.count += 1;
    }
    this.tell(this.count);
  }

  /** Parses and shows the whole text, because a definition at its end may turn earlier text into links. */
  finish(text) {
    const fresh = blocks(parse(text));
    morphChildren(this.node, fresh);
    this.done = text;
    this.count = fresh.length;
    this.tell(this.count);
  }

  tell(count) {
    for (; this.told < count; this.told += 1) this.onBlock(this.node.childNodes[this.told]);
  }
}
