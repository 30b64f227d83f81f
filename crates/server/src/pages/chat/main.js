//! The chat page: the open conversation, the composer, and the running requests.

import { answer, hasDocs, modelInfo, modelNames, whenRefused } from "./api.js";
import { copyText } from "./clipboard.js";
import { imagesOf, keepImages } from "./image-store.js";
import { Problem } from "./problem.js";
import { openSettings, showDefaults, startSettings } from "./settings.js";
import { dismiss, drawSidebar, startSidebar, uncover } from "./sidebar.js";
import { EMPTY, addTurn, loadChat, newChat, onOtherTab, saveChat, saveSettings, saveTab, settings, showVersion, shown, tab, versions } from "./store.js";
import { ImageTray, setImageLimit, startDrops } from "./tray.js";
import { TurnView } from "./turn.js";

const $ = (id) => document.getElementById(id);
const main = document.querySelector("main");

/** The page follows the answer while the end of the conversation is at most this far out of view. */
const NEAR_PX = 80;

/** The number of blocks that stay in the live region. The screen reader has read the earlier ones. */
const MOST_SPOKEN = 3;

/** The conversation that is shown. */
let chat = newChat();

/** The conversations that are being answered: identifier → {chat, turn, controller}. */
const runs = new Map();

/** The views of the turns that are shown, by the identifiers of the turns. */
const views = new Map();

/** Whether the user is leaving the page. A connection that breaks then is not the server's fault. */
let leaving = false;

/** Whether the end of the conversation is in view. */
let atEnd = true;

/** The sentence about images that cannot be kept, if there are some. */
let unkept = "";

/** The images of the message that is being written. */
const tray = new ImageTray($("composer"), $("input"), [], (busy) => ($("send").disabled = busy));

// ------------------------------------------------------------------------------------------------ the conversation

const say = (text) => ($("status").textContent = text);

function speak(text) {
  const node = document.createElement("p");
  node.textContent = text;
  $("spoken").append(node);
  while ($("spoken").children.length > MOST_SPOKEN) $("spoken").firstChild.remove();
}

const actions = {
  busy: () => runs.has(chat.id),
  say,
  speak,
  edit: (turn, text, images) => run(addTurn(chat, turn.parent, text, images)),
  again(turn) {
    // A failed attempt without an answer is replaced, not kept as a version.
    const next = turn.problem && !turn.content ? turn : addTurn(chat, turn.parent, turn.user, turn.images);
    chat.head = next.id;
    run(next);
  },
  amend(turn, text) {
    Object.assign(turn, { content: text, note: "Edited.", problem: "", stats: "" });
    keep(chat);
    views.get(turn.id).draw(false);
  },
  version(turn, step) {
    showVersion(chat, turn);
    keep(chat);
    showAll();
    const view = views.get(turn.id), [wanted, other] = step < 0 ? [view.earlier, view.later] : [view.later, view.earlier];
    (wanted.disabled ? other : wanted).focus();
    view.node.scrollIntoView({ block: "nearest" });
  },
};

/** Keeps a chat in the browser, or says why it cannot be kept. */
function keep(which) {
  const full = saveChat(which);
  problem(full || unkept);
  // Images of a chat that is not stored could not be found again.
  if (full) return;
  keepImages(imagesOf([which])).then((said) => {
    if (said !== unkept) problem((unkept = said));
  });
}

function problem(text) {
  $("full").textContent = text;
  $("full").hidden = !text;
}

/** Shows the conversation. Turns that are shown already stay as they are. */
function showAll() {
  const turns = shown(chat), running = runs.get(chat.id)?.turn, ids = new Set(turns.map((turn) => turn.id));
  for (const [id, view] of views) {
    if (ids.has(id)) continue;
    view.node.remove();
    views.delete(id);
  }
  turns.forEach((turn, i) => {
    if (!views.has(turn.id)) views.set(turn.id, new TurnView(turn, actions));
    const view = views.get(turn.id);
    view.draw(turn === running, versions(chat, turn));
    if ($("log").children[i] !== view.node) $("log").insertBefore(view.node, $("log").children[i] ?? null);
  });
  $("welcome").hidden = turns.length > 0;
  $("send").hidden = Boolean(running);
  $("stop").hidden = !running;
  document.title = chat.title ? `${chat.title} · Octavo` : "Octavo";
}

function toEnd() {
  main.scrollTop = main.scrollHeight;
  atEnd = true;
  $("to-end").hidden = true;
}

/** Opens a conversation, a new one if there is none of that identifier. */
function open(id) {
  chat = runs.get(id)?.chat ?? loadChat(id) ?? newChat();
  for (const turn of chat.turns) {
    if (turn.open && runs.get(chat.id)?.turn !== turn) Object.assign(turn, { open: false, note: "Interrupted." });
  }
  tab.chat = chat.id;
  saveTab();
  for (const view of views.values()) view.node.remove();
  views.clear();
  $("spoken").replaceChildren();
  showAll();
  toEnd();
  drawSidebar();
}

function fresh() {
  open("");
  dismiss();
  uncover();
  say("New chat");
  $("input").focus();
}

/** Generates the answer of a turn of the open conversation. */
async function run(turn) {
  const mine = { chat, turn, controller: new AbortController() }, { id } = chat;
  if (runs.has(id)) return;
  runs.set(id, mine);
  Object.assign(turn, EMPTY(), { open: true });
  mine.chat.updated = Date.now();
  keep(mine.chat);
  $("spoken").replaceChildren();
  showAll();
  toEnd();
  drawSidebar();
  $("input").focus();
  say("Answering");
  try {
    const update = () => views.get(turn.id)?.update(() => atEnd && toEnd());
    await answer(shown(mine.chat), mine.controller.signal, update);
  } catch (error) {
    if (error.name === "AbortError") turn.note = "Stopped.";
    else if (leaving) turn.note = "Interrupted.";
    else turn.problem = error instanceof Problem ? error.message : "The connection to the server was lost.";
  } finally {
    mine.controller.abort();
  }
  turn.open = false;
  // A chat that was deleted meanwhile stays so.
  if (runs.get(id) !== mine) return;
  runs.delete(id);
  keep(mine.chat);
  drawSidebar();
  if (chat !== mine.chat) return;
  showAll();
  if (atEnd) toEnd();
  say(turn.problem || turn.note || "Answered");
}

const stop = () => runs.get(chat.id)?.controller.abort();

// ---------------------------------------------------------------------------------------------------- controls

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const user = $("input").value;
  if (runs.has(chat.id) || tray.busy || (!user.trim() && !tray.images.length)) return;
  $("input").value = "";
  dismiss();
  run(addTurn(chat, chat.head, user, tray.take()));
});
$("input").addEventListener("keydown", (event) => {
  // Enter also ends the composition of a character; then it sends nothing.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("composer").requestSubmit();
});
$("new").addEventListener("click", fresh);
$("stop").addEventListener("click", () => (stop(), $("input").focus()));
$("to-end").addEventListener("click", () => (toEnd(), $("input").focus()));
$("model").addEventListener("change", () => ((settings.model = $("model").value), saveSettings()));
$("log").addEventListener("click", (event) => {
  const button = event.target.closest("button.copy");
  if (button) copyText(button.closest("figure").querySelector("code").textContent, button);
});
main.addEventListener("scroll", () => {
  atEnd = main.scrollHeight - main.scrollTop - main.clientHeight < NEAR_PX;
  $("to-end").hidden = atEnd;
});
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open && !$("menu").matches(":popover-open") && !uncover(true)) stop();
  if (event.key.toLowerCase() === "k" && (event.ctrlKey || event.metaKey) && !event.shiftKey && !event.altKey) {
    event.preventDefault();
    if (!$("settings").open) fresh();
  }
});
addEventListener("beforeunload", () => (leaving = true));
addEventListener("pageshow", () => (leaving = false));
addEventListener("pagehide", () => [...runs.values()].forEach((running) => saveChat(running.chat)));

/** Fills the model picker, which shows only if there is a choice, and the placeholders of the settings; lets images in if the model takes some. */
async function models() {
  let names;
  try {
    names = await modelNames();
  } catch (error) {
    $("served").textContent = error instanceof Problem ? error.message : "";
    return;
  }
  if (!names.includes(settings.model)) settings.model = names[0] ?? "";
  $("model").replaceChildren(...names.map((name) => new Option(name, name, false, name === settings.model)));
  $("served").textContent = $("served").title = names.length === 1 ? names[0] : "";
  $("served").hidden = names.length > 1;
  $("picker").hidden = names.length < 2;
  const { defaults, images } = await modelInfo();
  showDefaults(defaults);
  setImageLimit(images);
  tray.refresh();
}

$("composer").prepend(tray.node, tray.button);
startDrops(tray);
whenRefused(openSettings);
startSettings((asked) => {
  models();
  const last = shown(chat).at(-1);
  if (asked && last?.problem) actions.again(last);
});
startSidebar({
  open(id) {
    open(id);
    uncover();
    $("input").focus();
  },
  current: () => chat.id,
  held: () => [...new Set([chat, ...[...runs.values()].map((running) => running.chat)])].filter(({ turns }) => turns.length),
  isRunning: (id) => runs.has(id),
  deleted(ids) {
    for (const id of ids) {
      runs.get(id)?.controller.abort();
      runs.delete(id);
    }
    if (ids.includes(chat.id)) open("");
  },
  renamed(id, title) {
    const held = chat.id === id ? chat : (runs.get(id)?.chat ?? loadChat(id));
    held.title = title;
    keep(held);
    showAll();
  },
  problem,
});
onOtherTab((id) => {
  const editing = $("log").querySelector(".editor");
  if (id === chat.id && !runs.has(id) && !editing && loadChat(id)) open(id);
  else drawSidebar();
});
showDefaults(null);
open(tab.chat);
models();
hasDocs().then((there) => ($("docs").hidden = !there));
