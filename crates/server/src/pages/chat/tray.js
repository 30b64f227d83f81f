//! The images of a message: shown, and chosen by a button, by paste and by drop.

import { element, iconButton } from "./elements.js";
import { TYPES, prepare } from "./image-file.js";
import { discardImages, imageUrl, newImage } from "./image-store.js";
import { Problem } from "./problem.js";

/** The most images that a prompt may have; 0 if the model takes none. */
let limit = 0;
export const setImageLimit = (count) => (limit = count);

/** The trays by their forms. */
const trays = new WeakMap();

const say = (text) => (document.getElementById("status").textContent = text);

/** An element that shows an image, or says that the browser does not have it. */
function picture(image) {
  const node = element("span", "picture");
  imageUrl(image).then((url) => {
    if (!url) return node.append(element("span", "quiet", `“${image.name}” is not in this browser.`));
    const shown = element("img");
    shown.alt = image.name;
    shown.src = url;
    node.append(shown);
  });
  return node;
}

/** The images of a message that was sent. */
export function imageList(images) {
  const list = element("ul", "images");
  list.setAttribute("aria-label", "Images");
  list.append(...images.map((image) => {
    const item = element("li");
    item.append(picture(image));
    return item;
  }));
  return list;
}

/** The images of the message that a form is for. They can be removed, and others added. */
export class ImageTray {
  /** `onChange(busy)` is called when images come or go. `input` is the field of the message's text. */
  constructor(form, input, images = [], onChange = () => {}) {
    this.input = input;
    this.onChange = onChange;
    this.images = [];
    this.added = [];
    this.reading = 0;
    this.list = element("ul", "images");
    this.list.setAttribute("aria-label", "Images of the message");
    this.problem = element("p", "problem");
    this.problem.setAttribute("role", "alert");
    this.node = element("div", "tray");
    this.node.append(this.list, this.problem);
    this.buildButton();
    trays.set(form, this);
    images.forEach((image) => this.place(image));
    this.refresh();
  }

  buildButton() {
    this.files = element("input");
    this.files.type = "file";
    this.files.accept = TYPES.join();
    this.files.multiple = true;
    this.files.hidden = true;
    this.files.addEventListener("change", () => {
      this.add([...this.files.files]);
      this.files.value = "";
    });
    this.button = iconButton("image", "Add images", () => this.files.click());
    this.node.append(this.files);
  }

  /** Whether files are still being read. */
  get busy() {
    return this.reading > 0;
  }

  /** Shows the present state, and the button only if the model takes images. */
  refresh() {
    this.button.hidden = limit === 0;
    this.list.hidden = !this.list.children.length;
    this.problem.hidden = !this.problem.textContent;
    this.node.hidden = this.list.hidden && this.problem.hidden;
    this.onChange(this.busy);
  }

  place(image) {
    const item = element("li");
    const remove = iconButton("close", `Remove “${image.name}”`, () => this.remove(image, item));
    item.append(picture(image), remove);
    this.list.append(item);
    this.images.push(image);
  }

  /** Adds the images of files, and says why a file is none. */
  async add(files) {
    const problems = [], names = [];
    this.problem.textContent = "";
    this.reading += 1;
    this.refresh();
    for (const file of files) {
      if (this.images.length >= limit) {
        problems.push(limit ? `A prompt may have ${limit} image${limit === 1 ? "" : "s"} at most.` : "The model takes no images.");
        break;
      }
      try {
        const image = newImage(file.name, await prepare(file));
        this.added.push(image);
        this.place(image);
        names.push(image.name);
      } catch (error) {
        problems.push(error instanceof Problem ? error.message : `“${file.name}” cannot be read.`);
      }
    }
    this.reading -= 1;
    this.problem.textContent = problems.join("\n");
    this.refresh();
    if (names.length) say(`Added ${names.join(", ")}`);
    this.input.focus();
  }

  remove(image, item) {
    const next = item.nextElementSibling ?? item.previousElementSibling;
    item.remove();
    this.images = this.images.filter((other) => other !== image);
    if (this.added.includes(image)) discardImages([image]);
    this.problem.textContent = "";
    this.refresh();
    say(`Removed ${image.name}`);
    (next?.querySelector("button") ?? this.input).focus();
  }

  /** Hands over the images, and is empty then. */
  take() {
    const { images } = this;
    this.images = [];
    this.added = [];
    this.list.replaceChildren();
    this.problem.textContent = "";
    this.refresh();
    return images;
  }

  /** Forgets the images that were added. */
  discard() {
    discardImages(this.added);
    this.take();
  }
}

/** Adds files that are dropped anywhere, or pasted outside fields, to the tray of their form, or else to `main`. */
export function startDrops(main) {
  const trayAt = ({ target }) => {
    if (document.querySelector("dialog[open]")) return null;
    return trays.get(target.closest?.("form")) ?? main;
  };
  const mark = (event) => {
    for (const node of document.querySelectorAll(".dropping")) node.classList.remove("dropping");
    if (event && limit) trayAt(event)?.input.form.classList.add("dropping");
  };
  addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    // Otherwise the browser would leave the page to show the file.
    event.preventDefault();
    event.dataTransfer.dropEffect = trayAt(event) ? "copy" : "none";
    mark(event);
  });
  addEventListener("dragleave", (event) => event.relatedTarget || mark(null));
  addEventListener("drop", (event) => {
    mark(null);
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    trayAt(event)?.add([...event.dataTransfer.files]);
  });
  addEventListener("paste", (event) => {
    const { files, types } = event.clipboardData, field = event.target.closest?.("input, textarea");
    // Office programs add a picture of the text that was copied.
    const isText = types.includes("text/plain") && types.includes("text/html");
    if (!files.length || isText || (field && !trays.has(field.form))) return;
    event.preventDefault();
    trayAt(event)?.add([...files]);
  });
}
