//! Elements, buttons and icons. Icons are strokes in a box of 24 by 24.

const PATHS = {
  again: "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6",
  check: "M5 12.5l5 5L19.5 7",
  close: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  edit: "M4 20l1-4.5L16.5 4 20 7.5 8.5 19zM14 6.5l3.5 3.5",
  image: "M4 5h16v14H4zM4 16.5l4.5-4.5 4 4 3-3 4.5 4.5M15.5 9h.01",
  left: "M14.5 6l-6 6 6 6",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  right: "M9.5 6l6 6-6 6",
};

const SVG = "http://www.w3.org/2000/svg";

/** An icon that assistive technology ignores. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg"), path = document.createElementNS(SVG, "path");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("icon");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

/** An element with a class and a text, either of which may be left out. */
export function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

/** A button that shows an icon and is named `label`. */
export function iconButton(name, label, onClick) {
  const button = element("button", "icon-button");
  button.type = "button";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.append(icon(name));
  if (onClick) button.addEventListener("click", onClick);
  return button;
}
