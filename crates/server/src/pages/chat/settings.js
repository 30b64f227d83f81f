//! The dialog with the settings.

import { SAMPLING, saveSettings, saveTab, settings, tab } from "./store.js";

const $ = (id) => document.getElementById(id);
const form = document.querySelector("#settings form");

/** The values that apply if neither the user nor the model sets one. */
const NEUTRAL = { temperature: 1, top_p: 1, top_k: "off", min_p: "off", repetition_penalty: 1 };

/** Opens the dialog, with a sentence if a key is asked for. */
export function openSettings(problem = "") {
  $("ask").textContent = problem;
  $("ask").hidden = !problem;
  // An open dialog keeps its input.
  if ($("settings").open) return;
  form.elements.key.value = tab.key;
  for (const name of ["system", ...SAMPLING]) form.elements[name].value = settings[name];
  $("settings").showModal();
  form.elements.key.select();
}

/** Shows the model's sampling defaults where nothing is set; null if they are not known. */
export function showDefaults(defaults) {
  for (const name of Object.keys(NEUTRAL)) {
    const value = defaults?.[name] ?? (defaults ? NEUTRAL[name] : undefined);
    form.elements[name].placeholder = value <= 0 && NEUTRAL[name] === "off" ? "off" : (value ?? "the model's");
  }
  form.elements.max_completion_tokens.placeholder = defaults?.max_new_tokens ?? "no limit";
}

/** Calls `onKey(asked)` when the key changes. `asked` says whether the server asked for it. */
export function startSettings(onKey) {
  form.addEventListener("submit", () => {
    const before = tab.key;
    tab.key = form.elements.key.value.trim();
    for (const name of ["system", ...SAMPLING]) settings[name] = form.elements[name].value;
    saveTab();
    saveSettings();
    if (tab.key !== before) onKey(!$("ask").hidden);
  });
  $("reset").addEventListener("click", () => {
    for (const name of SAMPLING) form.elements[name].value = "";
    $("status").textContent = "The sampling settings are the model's.";
  });
  $("settings").addEventListener("close", () => $("input").focus());
  $("open").addEventListener("click", () => openSettings());
}
