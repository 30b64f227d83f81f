//! The list of chats: open, rename, export, delete.

import { saveFile } from "./clipboard.js";
import { element, iconButton } from "./elements.js";
import { discardImages, imagesOf, keepImages, removeImages, withImages } from "./image-store.js";
import { deleteChat, loadChats, saveChat, saveSettings, settings, shown } from "./store.js";

const $ = (id) => document.getElementById(id);

/** On a narrow screen the list covers the chat. */
const narrow = matchMedia("(max-width: 56rem)");

/** The actions of the rest of the page: `open(id)`, `current()`, `held()`, `isRunning(id)`, `deleted(ids)`, `renamed(id, title)`, `problem(text)`. */
let page;

/** The chat whose menu is open. */
let chosen = null;

/** The chats that were deleted last. */
let bin = [];

export function startSidebar(actions) {
  page = actions;
  $("chats").addEventListener("click", () => setOpen($("side").hidden, true));
  $("veil").addEventListener("click", () => setOpen(false, true));
  $("close-side").addEventListener("click", () => setOpen(false, true));
  narrow.addEventListener("change", () => setOpen(!narrow.matches && settings.side));
  $("rename").addEventListener("click", rename);
  $("export-markdown").addEventListener("click", () => choose(exportMarkdown));
  $("export-json").addEventListener("click", () => choose(async (chat) => saveFile(`${fileName(chat.title)}.json`, "application/json", JSON.stringify(await withImages(chat), null, 2))));
  $("delete").addEventListener("click", () => choose((chat) => remove([chat])));
  $("export-all").addEventListener("click", async () => saveFile("octavo-chats.json", "application/json", JSON.stringify(await Promise.all(all().map(withImages)), null, 2)));
  $("delete-all").addEventListener("click", () => remove(all()));
  $("undo").addEventListener("click", undo);
  $("dismiss").addEventListener("click", () => dismiss(true));
  $("menu").addEventListener("keydown", moveInMenu);
  setOpen(!narrow.matches && settings.side);
}

/** All chats, the latest first. A chat in memory may be newer than its stored copy, or not stored at all. */
function all() {
  const held = page.held(), ids = new Set(held.map((chat) => chat.id));
  return [...held, ...loadChats().filter((chat) => !ids.has(chat.id))].sort((a, b) => b.updated - a.updated);
}

/** Shows or hides the list. */
function setOpen(open, byHand = false) {
  const covers = open && narrow.matches;
  $("side").hidden = !open;
  $("veil").hidden = !covers;
  $("page").inert = covers;
  $("chats").setAttribute("aria-expanded", open);
  if (!byHand) return;
  if (!narrow.matches) {
    settings.side = open;
    saveSettings();
  }
  if (covers) ($("side").querySelector("[aria-current]") ?? $("close-side")).focus();
  else if (!open) $("chats").focus();
}

/** Hides the list if it covers the chat, and says whether it did. */
export function uncover(byHand = false) {
  const covers = narrow.matches && !$("side").hidden;
  if (covers) setOpen(false, byHand);
  return covers;
}

/** Shows all chats again. */
export function drawSidebar() {
  const chats = all();
  const focused = $("list").contains(document.activeElement) ? document.activeElement.closest("li")?.dataset.id : null;
  $("list").replaceChildren(...chats.map(entry));
  $("none").hidden = chats.length > 0;
  $("side-foot").hidden = chats.length === 0;
  if (focused) find(focused)?.querySelector("button").focus();
}

const find = (id) => [...$("list").children].find((node) => node.dataset.id === id);

function entry(chat) {
  const node = element("li"), open = element("button", "chat", chat.title || "Untitled");
  const more = iconButton("more", `Options for “${chat.title}”`, () => openMenu(chat, more));
  node.dataset.id = chat.id;
  open.type = "button";
  open.title = chat.title;
  if (chat.id === page.current()) open.setAttribute("aria-current", "true");
  if (page.isRunning(chat.id)) open.append(element("span", "unseen", " (answering)"), element("span", "dot"));
  open.addEventListener("click", () => page.open(chat.id));
  more.setAttribute("aria-haspopup", "menu");
  node.append(open, more);
  return node;
}

// ---------------------------------------------------------------------------------------------------- one chat

function openMenu(chat, button) {
  chosen = chat.id;
  const menu = $("menu"), box = button.getBoundingClientRect();
  menu.showPopover();
  menu.style.left = `${Math.max(8, Math.min(box.left, innerWidth - menu.offsetWidth - 8))}px`;
  menu.style.top = `${Math.max(8, Math.min(box.bottom + 4, innerHeight - menu.offsetHeight - 8))}px`;
  menu.firstElementChild.focus();
}

function moveInMenu(event) {
  const items = [...$("menu").children], at = items.indexOf(document.activeElement);
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: -1 }[event.key];
  if (event.key === "Tab") $("menu").hidePopover();
  if (to === undefined) return;
  event.preventDefault();
  items.at(to % items.length).focus();
}

/** Closes the menu and does something with its chat. */
function choose(action) {
  $("menu").hidePopover();
  const chat = all().find(({ id }) => id === chosen);
  if (chat) action(chat);
}

function rename() {
  choose((chat) => {
    const node = find(chat.id), input = element("input");
    input.value = chat.title;
    input.maxLength = 200;
    input.setAttribute("aria-label", "Name of the chat");
    let open = true;
    const end = (keep) => {
      if (!open) return;
      open = false;
      const title = input.value.trim(), held = document.activeElement === input;
      if (keep && title && title !== chat.title) page.renamed(chat.id, title);
      drawSidebar();
      if (held) find(chat.id)?.querySelector("button").focus();
    };
    input.addEventListener("blur", () => end(true));
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") event.stopPropagation();
      if (event.key === "Escape" || (event.key === "Enter" && !event.isComposing)) end(event.key === "Enter");
    });
    node.replaceChildren(input);
    input.select();
  });
}

/** A title as the name of a file. */
const fileName = (title) => title.replace(/[^\p{L}\p{N}_-]+/gu, " ").trim().slice(0, 60) || "chat";

function exportMarkdown(chat) {
  const images = (turn) => (turn.images ?? []).map(({ name }) => `Image: ${name}\n\n`).join("");
  const parts = shown(chat).map((turn) => `## You\n\n${images(turn)}${turn.user}\n\n## Answer\n\n${turn.content || turn.note || turn.problem}\n`);
  saveFile(`${fileName(chat.title)}.md`, "text/markdown", `# ${chat.title}\n\n${parts.join("\n")}`);
}

// ------------------------------------------------------------------------------------------------ delete, undo

function remove(chats) {
  discardImages(imagesOf(bin));
  bin = chats;
  for (const chat of chats) deleteChat(chat.id);
  removeImages(imagesOf(chats));
  page.deleted(chats.map((chat) => chat.id));
  drawSidebar();
  $("toast-text").textContent = chats.length === 1 ? `Deleted “${chats[0].title}”.` : `Deleted ${chats.length} chats.`;
  $("toast").hidden = false;
  // The pressed button is gone or has nothing left to do, and the list may cover the one that undoes it.
  uncover();
  $("undo").focus();
}

function undo() {
  const chats = bin, [first] = chats;
  bin = [];
  const full = chats.map(saveChat).find(Boolean);
  if (full) page.problem(full);
  else keepImages(imagesOf(chats)).then((said) => said && page.problem(said));
  dismiss();
  drawSidebar();
  if (first) page.open(first.id);
}

/** Forgets the chats that were deleted. */
export function dismiss(byHand = false) {
  discardImages(imagesOf(bin));
  bin = [];
  $("toast").hidden = true;
  if (byHand) $("input").focus();
}
