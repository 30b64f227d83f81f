//! Images in the browser: in IndexedDB, because localStorage has no room for them. A turn has their identifiers and names.

import { dataUrl } from "./image-file.js";
import { newId, path } from "./store.js";

const NAME = `octavo:images:${path}`;
const STORE = "images";

const NOT_KEPT = "The browser does not store the images of this chat. They are lost when the page is closed or reloaded.";

/** The images that are not in the database: identifier → Blob. */
const unkept = new Map();

/** The connection to the database, once there is one. */
let connection;

/** The end of the last operation. Each waits for the one before it. */
let last = Promise.resolve();
const inTurn = (act) => (last = last.then(act, act));

function connect() {
  connection ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => request.result.createObjectStore(STORE);
    request.onerror = () => reject(request.error);
    request.onsuccess = () => {
      request.result.onclose = () => (connection = undefined);
      resolve(request.result);
    };
  });
  connection.catch(() => (connection = undefined));
  return connection;
}

/** Lets `act(store)` use the database, and returns the result of the request that it returns. */
async function transact(mode, act) {
  const transaction = (await connect()).transaction(STORE, mode);
  const request = act(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onabort = () => reject(transaction.error);
  });
}

/** A new image: {id, name}. */
export function newImage(name, blob) {
  const id = newId();
  unkept.set(id, blob);
  return { id, name };
}

/** Forgets images that are not in the database. */
export const discardImages = (images) => images.forEach(({ id }) => unkept.delete(id));

/** All images of chats. */
export const imagesOf = (chats) => chats.flatMap((chat) => chat.turns.flatMap((turn) => turn.images ?? []));

/** Stores images that are not stored. Returns a sentence if that fails, and an empty string otherwise. */
export function keepImages(images) {
  return inTurn(async () => {
    const missing = images.filter(({ id }) => unkept.has(id));
    if (!missing.length) return "";
    try {
      await transact("readwrite", (store) => missing.forEach(({ id }) => store.put(unkept.get(id), id)));
    } catch {
      return NOT_KEPT;
    }
    discardImages(missing);
    return "";
  });
}

/** Removes images from the database. They stay in memory until they are discarded or kept again. */
export function removeImages(images) {
  if (!images.length) return;
  const remove = (store, id) => {
    store.get(id).onsuccess = ({ target }) => {
      if (target.result) unkept.set(id, target.result);
      store.delete(id);
    };
  };
  inTurn(() => transact("readwrite", (store) => images.forEach(({ id }) => remove(store, id)))).catch(() => {});
}

/** The `data:` URL of an image, or null if the browser does not have it. */
export async function imageUrl({ id }) {
  try {
    const blob = unkept.get(id) ?? (await inTurn(() => unkept.get(id) ?? transact("readonly", (store) => store.get(id))));
    return blob ? await dataUrl(blob) : null;
  } catch {
    return null; // The browser refuses access, or the file is gone.
  }
}

/** A copy of a chat whose images have their URLs. */
export async function withImages(chat) {
  const url = async (image) => ({ ...image, url: await imageUrl(image) });
  const whole = async (turn) => (turn.images ? { ...turn, images: await Promise.all(turn.images.map(url)) } : turn);
  return { ...chat, turns: await Promise.all(chat.turns.map(whole)) };
}
