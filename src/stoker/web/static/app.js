// For every page: times, results of buttons, confirmations and menus.
"use strict";

const Stoker = (() => {
  const UNDO_FOR = 8000; // milliseconds
  const TELL_EVERY = 5000;
  const MOST_LISTED = 20; // ended jobs on the page: when all are new there may be more
  const byServer = Number(document.body.dataset.now);
  // The difference between the queue's clock, on which all times are based, and this one.
  let ahead = byServer ? byServer * 1000 - Date.now() : 0;

  // Times

  function spoken(seconds) {
    const whole = Math.max(0, Math.round(seconds));
    if (whole <= 90) return `${whole} s`;
    const minutes = Math.round(whole / 60);
    if (minutes < 60) return `${minutes} min`;
    if (minutes < 48 * 60) return minutes % 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${minutes / 60} h`;
    return `${Math.round(minutes / (24 * 60))} days`;
  }

  function clock(moment) {
    const today = new Date(Date.now() + ahead);
    const hours = moment.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    if (moment.toDateString() === today.toDateString()) return hours;
    return `${moment.toLocaleDateString([], { day: "numeric", month: "short" })}, ${hours}`;
  }

  function told(element) {
    const moment = new Date(element.dateTime);
    const seconds = (Date.now() + ahead - moment.getTime()) / 1000;
    switch (element.dataset.tell) {
      case "for": return spoken(seconds);
      case "in": return seconds < 0 ? `in ${spoken(-seconds)}` : "now";
      case "clock": return clock(moment);
      default: return seconds < 5 ? "just now" : `${spoken(seconds)} ago`;
    }
  }

  function tellTimes(within = document) {
    for (const element of within.querySelectorAll("time[data-tell]")) {
      const text = told(element);
      if (element.textContent !== text) element.textContent = text;
      if (!element.title) element.title = new Date(element.dateTime).toLocaleString();
    }
  }

  // Toasts

  function toast(message, { bad = false, undo = null } = {}) {
    const box = document.createElement("div");
    box.className = bad ? "toast bad" : "toast";
    const words = document.createElement("p");
    words.textContent = message;
    box.append(words);
    const close = () => box.remove();
    if (undo) box.append(button("Undo", () => { close(); call(undo.method, undo.path, undo.body); }));
    const cross = button("✕", close);
    cross.setAttribute("aria-label", "Close");
    box.append(cross);
    const toasts = document.getElementById("toasts");
    while (toasts.children.length > 1) toasts.firstElementChild.remove();
    toasts.append(box);
    const leave = () => (box.matches(":hover, :focus-within") ? setTimeout(leave, 2000) : close());
    setTimeout(leave, bad ? 2 * UNDO_FOR : UNDO_FOR);
  }

  function button(label, act) {
    const made = document.createElement("button");
    made.type = "button";
    made.textContent = label;
    made.addEventListener("click", act);
    return made;
  }

  function outcome(status, text) {
    let answer = null;
    try { answer = JSON.parse(text); } catch { /* a proxy's page, or nothing */ }
    if (status === 401) goToLogin();
    else if (status >= 200 && status < 300) {
      if (answer?.message) toast(answer.message, { undo: answer.undo });
    } else {
      const first = answer?.errors?.[0]?.detail;
      toast(first || answer?.detail || answer?.title || "The request failed: the server gave no reason", { bad: true });
    }
    return answer;
  }

  function goToLogin() {
    location.assign(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
  }

  async function call(method, path, body) {
    try {
      const answer = await fetch(path, {
        method,
        credentials: "same-origin",
        headers: { "Content-Type": "application/json", Accept: "application/json" },
        body: body === null || body === undefined ? undefined : JSON.stringify(body),
      });
      const text = await answer.text();
      const done = outcome(answer.status, text);
      return answer.ok ? done ?? true : false;
    } catch {
      toast("The server does not answer: the change may or may not have been made", { bad: true });
      return false;
    }
  }

  // Buttons send JSON, in which numbers stay numbers.
  htmx.defineExtension("json", {
    onEvent(name, event) {
      if (name === "htmx:configRequest" && event.detail.verb !== "get") {
        event.detail.headers["Content-Type"] = "application/json";
        event.detail.headers["Accept"] = "application/json";
      }
    },
    encodeParameters(_request, _parameters, element) { return element.getAttribute("hx-vals") || "{}"; },
  });
  // An update may remove a button before its response arrives, and htmx then sends it no event: listen to the request itself.
  document.addEventListener("htmx:beforeRequest", (event) => {
    const request = event.detail.xhr;
    if (event.detail.requestConfig.verb === "get") return;
    request.addEventListener("loadend", () => {
      if (request.status) outcome(request.status, request.responseText);
      else toast("The server does not answer: the change may or may not have been made", { bad: true });
    });
  });

  // Confirmation

  // With a field it returns what was written there.
  function ask(question, yes, field = "") {
    return new Promise((resolve) => {
      const dialog = document.createElement("dialog");
      const words = document.createElement("p");
      words.id = "ask-words";
      words.textContent = question;
      const row = document.createElement("div");
      row.className = "row";
      const go = button(yes, () => dialog.close("yes"));
      go.className = field ? "primary" : "danger-now";
      const stay = button(field ? "Close" : "Keep it", () => dialog.close("no"));
      row.append(stay, go);
      dialog.setAttribute("aria-labelledby", "ask-words");
      const input = field ? inputOf(field, () => dialog.close("yes")) : null;
      (input ?? stay).autofocus = true;
      dialog.append(words, ...(input ? [input] : []), row);
      dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close("no"); });
      dialog.addEventListener("close", () => {
        dialog.remove();
        resolve(dialog.returnValue === "yes" && (input ? input.value.trim() : true));
        document.dispatchEvent(new Event("stoker:free"));
      });
      document.body.append(dialog);
      dialog.showModal();
    });
  }

  function inputOf(label, enter) {
    const input = document.createElement("input");
    input.type = "text";
    input.maxLength = 100;
    for (const [name, value] of Object.entries({ "aria-label": label, autocapitalize: "none", autocomplete: "off", spellcheck: "false" })) input.setAttribute(name, value);
    input.addEventListener("keydown", (event) => { if (event.key === "Enter") enter(); });
    return input;
  }

  document.addEventListener("htmx:confirm", async (event) => {
    if (!event.detail.question) return;
    event.preventDefault();
    if (await ask(event.detail.question, event.target.dataset.yes || "Yes")) event.detail.issueRequest(true);
  });

  // Menus: one at a time, closed by a choice, a click elsewhere or Escape

  function closeMenus(except = null) {
    for (const menu of document.querySelectorAll("details.menu[open]")) if (menu !== except) menu.open = false;
  }
  document.addEventListener("click", (event) => {
    const menu = event.target.closest("details.menu");
    const chose = menu && event.target.closest(".sheet button, .sheet a");
    closeMenus(chose ? null : menu);
    if (event.target.closest("[data-reload]")) location.reload();
    const back = event.target.closest("[data-back]");
    if (back && history.length > 1 && document.referrer.startsWith(location.origin)) {
      event.preventDefault();
      history.back();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    const menu = document.querySelector("details.menu[open]");
    if (!menu) return;
    menu.open = false;
    menu.querySelector("summary").focus();
  });
  // Keys, for lists of jobs on any page: nothing happens while somebody types

  const HELP = "/ search · j and k next and previous job · Enter open · x select, in the list of jobs · ? this help";
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.closest("input, textarea, select, [contenteditable]")) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    if (!document.querySelector("nav a[href='/jobs']")) return; // nobody is logged in
    const links = [...document.querySelectorAll("main .job h3 a, main .jobs tbody th a")].filter((one) => one.checkVisibility());
    const at = links.indexOf(document.activeElement);
    const row = links[at]?.closest("tr");
    const box = document.getElementById("q");
    if (event.key === "/" && box) box.focus();
    else if (event.key === "/") location.assign("/jobs#q");
    else if (event.key === "j") links[Math.min(at + 1, links.length - 1)]?.focus();
    else if (event.key === "k") links[Math.max(at - 1, 0)]?.focus();
    else if (event.key === "x" && row?.querySelector("[data-pick]")) {
      if (!row.closest(".selecting")) document.querySelector("[data-select]")?.click();
      row.querySelector("[data-pick]").click();
      links[at].focus();
    } else if (event.key === "?") toast(HELP);
    else return;
    event.preventDefault();
  });
  document.addEventListener("toggle", (event) => {
    if (!event.target.matches?.("details.menu[open]")) return;
    // Near the bottom of the window a menu opens upwards, unless it would be cut off at the top.
    const sheet = event.target.querySelector(".sheet");
    sheet.classList.remove("up");
    const low = window.innerWidth < 768 ? 64 : 0;
    const { bottom, height } = sheet.getBoundingClientRect();
    const above = event.target.getBoundingClientRect().top - 56; // what the bar at the top leaves
    if (bottom > window.innerHeight - low && height < above) sheet.classList.add("up");
  }, true);

  // Jobs that ended since the last visit

  const LOOKED = "stoker-looked";
  const lastLook = Number(read(LOOKED)) || 0;

  function read(key) {
    try { return localStorage.getItem(key); } catch { return null; } // private windows
  }
  function keep(key, value) {
    try { localStorage.setItem(key, value); } catch { /* private windows */ }
  }

  function markNew() {
    const note = document.getElementById("since-look");
    if (!note || !lastLook) return;
    const counts = { succeeded: 0, failed: 0, cancelled: 0 };
    const items = [...document.querySelectorAll("[data-ended]")];
    for (const item of items) {
      const isNew = Number(item.dataset.ended) > lastLook;
      item.classList.toggle("new", isNew);
      if (isNew) counts[item.dataset.state] += 1;
    }
    const parts = [
      counts.succeeded && `${counts.succeeded} finished`,
      counts.failed && `${counts.failed} failed`,
      counts.cancelled && `${counts.cancelled} cancelled`,
    ].filter(Boolean);
    const all = items.length >= MOST_LISTED && items.every((item) => item.classList.contains("new"));
    const ago = spoken((Date.now() + ahead) / 1000 - lastLook);
    const text = parts.length ? `Since your last visit ${ago} ago: ${all ? "at least " : ""}${parts.join(", ")}` : "";
    if (note.textContent !== text) note.textContent = text;
    note.hidden = !text;
  }

  function looked() {
    if (document.getElementById("since-look")) keep(LOOKED, String((Date.now() + ahead) / 1000));
  }
  addEventListener("pagehide", looked);
  document.addEventListener("visibilitychange", () => { if (document.visibilityState === "hidden") looked(); });

  function freshen(within = document) {
    tellTimes(within);
    markNew();
  }
  freshen();
  setInterval(() => { if (!document.hidden) freshen(); }, TELL_EVERY);

  return { ask, call, toast, freshen, goToLogin, now: () => Date.now() + ahead };
})();
