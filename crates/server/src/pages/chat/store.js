//! Storage in the browser: chats and settings in localStorage (images are in image-store.js), the API key and the open chat's identifier in sessionStorage.

/** Servers behind one proxy share an origin; each has its own path. */
export const path = new URL(document.baseURI).pathname;
const CHATS = `octavo:chat:${path}:`;
const SETTINGS = `octavo:settings:${path}`;
const TAB = `octavo:tab:${path}`;

/** The limit for all chats together, in UTF-16 code units. Browsers allow about five million per origin. */
const MOST_STORED = 4_000_000;

const FULL = "The browser's storage for this page is full, so this chat is not saved. Delete chats that you no longer need, or export this one.";

/** The sampling settings, by their names in a request. Each is a string, empty if the user did not set it. */
export const SAMPLING = [
  "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_completion_tokens", "seed",
];

function read(storage, key) {
  try {
    return JSON.parse(storage.getItem(key) ?? "null");
  } catch {
    return null; // The entry is damaged, or the browser refuses access.
  }
}

function write(storage, key, value) {
  try {
    storage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** The settings that stay when the tab is closed. */
export const settings = { model: "", system: "", side: true, ...Object.fromEntries(SAMPLING.map((name) => [name, ""])), ...read(localStorage, SETTINGS) };

/** The values that are lost when the tab is closed. */
export const tab = { key: "", chat: "", ...read(sessionStorage, TAB) };

export const saveSettings = () => write(localStorage, SETTINGS, settings);
export const saveTab = () => write(sessionStorage, TAB, tab);

export const newId = () => crypto.getRandomValues(new Uint32Array(3)).join("-");

/** A chat: {id, title, created, updated, head, turns}. `head` is the last turn that is shown. */
export const newChat = () => ({ id: newId(), title: "", created: Date.now(), updated: Date.now(), head: "", turns: [] });

function valid(chat) {
  return Array.isArray(chat?.turns) && typeof chat.id === "string" && chat.turns.every(validTurn);
}

function validTurn(turn) {
  const image = (image) => typeof image?.id === "string" && typeof image.name === "string";
  return typeof turn?.id === "string" && typeof turn.user === "string" && (!turn.images || (Array.isArray(turn.images) && turn.images.every(image)));
}

/** The chat of that identifier, or null. */
export function loadChat(id) {
  const chat = read(localStorage, CHATS + id);
  return valid(chat) ? chat : null;
}

const keys = () => {
  try {
    return Object.keys(localStorage).filter((key) => key.startsWith(CHATS));
  } catch {
    return [];
  }
};

/** All stored chats. */
export function loadChats() {
  return keys().map((key) => read(localStorage, key)).filter(valid);
}

/** Stores a chat. Returns a sentence if that fails, and an empty string otherwise. */
export function saveChat(chat) {
  const key = CHATS + chat.id, text = JSON.stringify(chat);
  const others = keys().filter((other) => other !== key).reduce((sum, other) => sum + localStorage.getItem(other).length, 0);
  if (others + text.length > MOST_STORED) return FULL;
  try {
    localStorage.setItem(key, text);
    return "";
  } catch {
    return FULL;
  }
}

export function deleteChat(id) {
  try {
    localStorage.removeItem(CHATS + id);
  } catch { /* The browser refuses access, so nothing is stored. */ }
}

/** Calls `callback` with the identifier of each chat that another tab changes or deletes, or with "" if it clears the storage. */
export function onOtherTab(callback) {
  addEventListener("storage", (event) => {
    if (event.key === null) callback("");
    else if (event.key.startsWith(CHATS)) callback(event.key.slice(CHATS.length));
  });
}

/** The turns that are shown: from the first one to the head. */
export function shown(chat) {
  const byId = new Map(chat.turns.map((turn) => [turn.id, turn]));
  const list = [];
  for (let turn = byId.get(chat.head); turn && !list.includes(turn); turn = byId.get(turn.parent)) list.push(turn);
  return list.reverse();
}

/** All turns that follow the same turn as `turn`, the oldest first. */
export const versions = (chat, turn) => chat.turns.filter((other) => other.parent === turn.parent);

/** Adds a turn after the turn `parent` ("": at the start) and makes it the head. `images` are {id, name} each. */
export function addTurn(chat, parent, user, images = []) {
  const turn = { id: newId(), parent, user, ...(images.length ? { images } : {}), ...EMPTY() };
  chat.turns.push(turn);
  chat.head = turn.id;
  chat.title ||= (user.trim() || (images[0]?.name ?? "")).split("\n")[0].slice(0, 60);
  return turn;
}

/** The fields of an answer that has not begun. */
export const EMPTY = () => ({ content: "", reasoning: "", calls: [], note: "", problem: "", stats: "" });

/** Shows a turn and the newest of its follow-up turns. */
export function showVersion(chat, turn) {
  for (let next = turn; next; next = chat.turns.findLast((other) => other.parent === next.id)) chat.head = next.id;
}
