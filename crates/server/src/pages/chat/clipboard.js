//! Copying and saving files.

import { element, icon } from "./elements.js";

const SHOWN_MS = 1500;

/** Copies a text without the clipboard API, which browsers offer only to pages with TLS and to localhost. */
function copyBySelection(text) {
  const area = element("textarea", "unseen");
  area.value = text;
  const focused = document.activeElement;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return copied;
}

/** Copies a text and says so on the button. */
export async function copyText(text, button) {
  let copied;
  try {
    await navigator.clipboard.writeText(text);
    copied = true;
  } catch {
    copied = copyBySelection(text);
  }
  const label = button.querySelector("span"), said = copied ? "Copied" : "Not copied";
  button.querySelector("svg").replaceWith(icon(copied ? "check" : "close"));
  if (label) label.textContent = said;
  document.getElementById("status").textContent = said;
  setTimeout(() => {
    button.querySelector("svg").replaceWith(icon("copy"));
    if (label) label.textContent = "Copy";
  }, SHOWN_MS);
}

/** Offers a file to save. */
export function saveFile(name, type, text) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
