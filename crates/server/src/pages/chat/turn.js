//! A question and its answer on the screen.

import { copyText } from "./clipboard.js";
import { element, iconButton } from "./elements.js";
import { Markdown } from "./markdown.js";
import { ImageTray, imageList } from "./tray.js";

/** The largest part of the time that drawing may take while an answer streams. */
const DRAWING_SHARE = 0.2;

/**
 * The view of a turn.
 *
 * `actions` are the effects of its buttons: `edit(turn, text, images)` asks again with another question, `amend(turn, text)` replaces the
 * answer, `again(turn)` answers the question again, `version(turn, step)` shows another version of the turn, `busy()` says
 * whether the chat is being answered, `say(text)` shows a status, and `speak(text)` has a screen reader read a text.
 */
export class TurnView {
  constructor(turn, actions) {
    this.turn = turn;
    this.actions = actions;
    this.streaming = false;
    this.thinking = false;
    this.node = element("section", "turn");
    this.buildQuestion();
    this.buildAnswer();
    this.node.append(this.question, this.reply);
  }

  buildQuestion() {
    this.question = element("div", "question");
    this.user = element("div", "user");
    if (this.turn.images?.length) this.user.append(imageList(this.turn.images));
    this.user.append(this.turn.user);
    this.editButton = iconButton("edit", "Edit message", () => this.editQuestion());
    this.questionTools = element("div", "tools");
    this.questionTools.append(this.editButton);
    this.question.append(element("h2", "unseen", "You"), this.user, this.questionTools);
  }

  buildAnswer() {
    this.reply = element("div", "answer");
    this.thought = element("details");
    const thoughts = element("div", "markdown"), content = element("div", "markdown");
    this.thought.append(element("summary", "", "Reasoning"), thoughts);
    this.text = element("div", "text");
    this.calls = element("div", "calls");
    this.text.append(content, this.calls);
    this.problem = element("p", "problem");
    this.reasoning = new Markdown(thoughts);
    this.content = new Markdown(content, (node) => this.streaming && this.actions.speak(spoken(node)));
    this.buildFoot();
    this.reply.append(element("h2", "unseen", "Answer"), this.thought, this.text, this.problem, this.foot);
  }

  buildFoot() {
    this.foot = element("div", "foot");
    this.facts = element("span", "facts");
    this.picker = element("span", "versions");
    this.earlier = iconButton("left", "Earlier version", () => this.turnTo(-1));
    this.later = iconButton("right", "Later version", () => this.turnTo(1));
    this.place = element("span");
    this.picker.append(this.earlier, this.place, this.later);
    this.tools = element("span", "tools");
    this.copy = iconButton("copy", "Copy answer", () => copyText(this.turn.content, this.copy));
    this.amend = iconButton("edit", "Edit answer", () => this.editAnswer());
    this.again = iconButton("again", "Try again", () => this.actions.again(this.turn));
    this.again.append(element("span", "", "Try again"));
    this.tools.append(this.copy, this.amend, this.again);
    this.foot.append(this.picker, this.tools, this.facts);
  }

  turnTo(step) {
    const other = this.versions[this.versions.indexOf(this.turn) + step];
    if (other) this.actions.version(other, step);
  }

  /** Draws the turn. `versions` are all turns at its place, including itself. */
  draw(streaming, versions = this.versions) {
    this.versions = versions;
    const { turn } = this;
    this.reply.setAttribute("aria-busy", streaming);
    this.thought.hidden = !turn.reasoning;
    // The page opens and closes it once each, and leaves it to the reader otherwise.
    const first = streaming && !turn.content && !turn.calls.length;
    if (first !== this.thinking) this.thought.open = this.thinking = first;
    this.reasoning.show(turn.reasoning.trim(), !streaming);
    this.content.show(turn.content, !streaming);
    this.streaming = streaming;
    this.calls.replaceChildren(...turn.calls.filter(Boolean).map(callNode));
    this.problem.hidden = !turn.problem;
    this.problem.textContent = turn.problem;
    this.facts.textContent = [turn.note, turn.stats].filter(Boolean).join(" · ");
    this.foot.classList.toggle("empty", !turn.content);
    this.again.classList.toggle("urgent", Boolean(turn.problem) || !turn.content);
    this.copy.hidden = this.amend.hidden = !turn.content;
    this.tools.hidden = streaming || this.text.hidden;
    this.editButton.disabled = this.amend.disabled = this.again.disabled = this.actions.busy();
    this.drawVersions(streaming);
  }

  drawVersions(streaming) {
    const place = this.versions.indexOf(this.turn) + 1, count = this.versions.length;
    this.picker.hidden = streaming || count < 2;
    this.place.textContent = `${place}/${count}`;
    this.earlier.disabled = place <= 1;
    this.later.disabled = place >= count;
  }

  /** Draws the turn at a later frame, then calls `then`. The delay grows with the duration of the last drawing. */
  update(then) {
    if (this.waits) return;
    this.waits = true;
    setTimeout(() => requestAnimationFrame(() => {
      this.waits = false;
      if (!this.streaming || !this.node.isConnected) return;
      const begun = performance.now();
      this.draw(true);
      this.pause = (performance.now() - begun) / DRAWING_SHARE;
      then();
    }), this.pause ?? 0);
  }

  editQuestion() {
    edit(this.user, this.questionTools, this.turn.user, { label: "Edit message", submit: "Send", back: this.editButton, images: this.turn.images ?? [], enterSends: true }, (text, images) => {
      // The editor may have been open before the answer began.
      if (this.actions.busy()) {
        this.actions.say("Wait until the answer is complete, or stop it.");
        return false;
      }
      this.actions.edit(this.turn, text, images);
      return true;
    });
  }

  editAnswer() {
    edit(this.text, this.tools, this.turn.content, { label: "Edit answer", submit: "Save", back: this.amend }, (text) => {
      this.actions.amend(this.turn, text);
      return true;
    });
  }
}

const callNode = (call) => {
  const node = element("pre", "call", `${call.name}(${call.arguments})`);
  node.tabIndex = 0;
  return node;
};

/** The text that a screen reader reads for a block. */
function spoken(node) {
  if (!node.matches?.("figure.code")) return node.textContent;
  const lines = node.querySelector("code").textContent.split("\n").length;
  return `Code, ${node.querySelector(".language").textContent}, ${lines} line${lines === 1 ? "" : "s"}.`;
}

/** Replaces `shown` and `tools` by an editor, of images too if it gets some, until the user cancels or `accept(text, images)` returns true. */
function edit(shown, tools, text, { label, submit, back, images, enterSends = false }, accept) {
  const form = element("form", "editor"), input = element("textarea"), row = element("div", "row");
  const cancel = element("button", "plain", "Cancel"), send = element("button", "primary", submit);
  cancel.type = "button";
  input.value = text;
  input.setAttribute("aria-label", label);
  const tray = images && new ImageTray(form, input, images);
  if (tray) row.append(tray.button);
  row.append(cancel, send);
  form.append(...(tray ? [tray.node] : []), input, row);
  const close = (focus) => {
    form.remove();
    shown.hidden = tools.hidden = false;
    if (focus) back.focus();
  };
  const sends = (event) => !event.isComposing && (event.ctrlKey || event.metaKey || (enterSends && !event.shiftKey));
  const leave = () => (tray?.discard(), close(true));
  const take = () => {
    if (tray?.busy || (!input.value.trim() && !tray?.images.length)) return;
    if (accept(input.value, tray?.images)) close(true);
  };
  cancel.addEventListener("click", leave);
  form.addEventListener("submit", (event) => (event.preventDefault(), take()));
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      leave();
    } else if (event.key === "Enter" && event.target === input && sends(event)) {
      event.preventDefault();
      take();
    }
  });
  shown.before(form);
  shown.hidden = tools.hidden = true;
  input.focus();
}
