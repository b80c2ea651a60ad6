// Keeps a page up to date: receives the sections that changed and replaces them without disturbing the user.
"use strict";

(() => {
  const SILENT_FOR = 40000; // milliseconds: the server sends a heartbeat every 15 s
  const AGAIN_AFTER = [500, 1000, 2000, 5000, 10000];
  const UNSEEN_FOR = 10000; // hidden pages close their connection
  const TOUCH_FOR = 1500; // longer touches are not taps
  const where = document.body.dataset.live;
  if (!where) return;

  const note = document.getElementById("connection");
  const pending = new Map(); // section -> its newest HTML, held back while the user touches the page
  let source = null;
  let listened = new Set();
  let heard = Date.now();
  let failures = 0;
  let again = 0;
  let problem = "";
  let touched = 0;
  let unseen = 0;

  // Changes by the user or a script are kept.
  Object.assign(Idiomorph.defaults.callbacks, {
    beforeNodeMorphed(old, fresh) {
      if (old.nodeType !== Node.ELEMENT_NODE) return true;
      if (old.hasAttribute("data-part")) return false; // a separate section
      if (old.hasAttribute("data-keep") && fresh.hasAttribute?.("data-keep")) return ["host", "gpu", "fit"].some((of) => old.dataset[of] !== fresh.dataset[of]);
      // A time that has not changed keeps its text.
      return !(old.matches("time[data-tell]") && fresh.matches("time[data-tell]") && old.dateTime === fresh.dateTime && old.dataset.tell === fresh.dataset.tell);
    },
    beforeAttributeUpdated(name, element) {
      return !(name === "open" && element.matches("details")) && name !== "data-folded" && !(name === "title" && element.matches("time"))
        && !(name === "class" && element.matches(".sheet")); // the direction it opened in
    },
  });

  // This device remembers folded machines, even after a restart of their worker.

  const folds = (() => {
    try { return JSON.parse(localStorage.getItem("folds")) ?? {}; } catch { return {}; }
  })();

  function fold(within = document) {
    for (const element of within.querySelectorAll("details[data-fold]:not([data-folded])")) {
      element.dataset.folded = ""; // once: afterwards it is as the user wants it
      const open = folds[element.dataset.fold];
      if (open !== undefined) element.open = open;
    }
  }

  // A toggle by the page itself matches the stored state.
  document.addEventListener("click", (event) => {
    const element = event.target.closest?.("summary")?.parentElement;
    if (!element?.matches("details[data-fold]")) return;
    folds[element.dataset.fold] = !element.open; // it changes after the click
    try { localStorage.setItem("folds", JSON.stringify(folds)); } catch { /* private windows */ }
  });
  fold();

  // Showing

  function busy() {
    return document.querySelector("dialog[open]") || document.querySelector(".sorting") || Date.now() - touched < TOUCH_FOR;
  }

  function show(name, html) {
    const section = document.getElementById(`section-${name}`);
    if (!section) return;
    htmx.swap(section, html, { swapStyle: "morph:innerHTML", swapDelay: 0, settleDelay: 0 }, { contextElement: section });
    Stoker.freshen(section);
    fold(section);
    section.dispatchEvent(new CustomEvent("stoker:swapped", { bubbles: true }));
    // Events of a new section were missed: a new connection sends all sections.
    if (names().some((other) => !listened.has(other))) connect();
  }

  const names = () => [...document.querySelectorAll("[id^='section-']")].map((section) => section.id.slice("section-".length));

  function flush() {
    if (busy()) return;
    for (const [name, html] of pending) {
      pending.delete(name);
      show(name, html);
    }
  }

  function take(name, html) {
    pending.set(name, html);
    flush();
  }

  // The page must not move during a tap.
  addEventListener("pointerdown", () => { touched = Date.now(); }, { capture: true, passive: true });
  for (const end of ["pointerup", "pointercancel"]) {
    addEventListener(end, () => { touched = 0; setTimeout(flush, 50); }, { capture: true, passive: true });
  }
  document.addEventListener("stoker:free", flush);

  // Listening

  function tell() {
    const words = problem ? `The queue is unavailable: ${problem}` : failures > 1 ? "Reconnecting…" : "";
    if (note.textContent !== words) note.textContent = words;
    note.hidden = !words;
  }

  function alive() {
    heard = Date.now();
    failures = 0;
    tell();
  }

  function rest() {
    clearTimeout(again);
    source?.close();
    source = null;
  }

  function connect() {
    rest();
    if (document.hidden) return; // in the background: `wake` connects
    heard = Date.now();
    source = new SharedSource(where);
    source.addEventListener("open", alive);
    source.addEventListener("beat", alive);
    source.addEventListener("problem", (event) => { problem = event.data; alive(); });
    source.addEventListener("gone", () => location.assign("/jobs"));
    listened = new Set(names());
    for (const name of listened) {
      source.addEventListener(name, (event) => { alive(); take(name, event.data); });
    }
    source.addEventListener("error", lost);
  }

  function lost() {
    failures += 1;
    tell();
    // The browser repeats some requests itself; after a response that is not a stream it stops, and the status says why.
    if (source?.readyState === EventSource.CLOSED) {
      askWhy();
      later();
    }
  }

  function later() {
    clearTimeout(again);
    again = setTimeout(connect, AGAIN_AFTER[Math.min(failures, AGAIN_AFTER.length) - 1] ?? 500);
  }

  async function askWhy() {
    const stop = new AbortController();
    try {
      const answer = await fetch(where, { signal: stop.signal, headers: { Accept: "text/event-stream" } });
      if (answer.status === 401) Stoker.goToLogin();
      if (answer.status === 404) location.assign("/jobs");
    } catch { /* unreachable: try again later */ } finally {
      stop.abort();
    }
  }

  // After sleep the connection may be dead without an error: check at once.
  function wake() {
    clearTimeout(unseen);
    if (document.hidden) {
      unseen = setTimeout(rest, UNSEEN_FOR);
      return;
    }
    Stoker.freshen();
    if (!source || Date.now() - heard > SILENT_FOR / 2 || source.readyState === EventSource.CLOSED) connect();
  }
  document.addEventListener("visibilitychange", wake);
  addEventListener("pageshow", (event) => { if (event.persisted) connect(); });
  addEventListener("online", () => connect());
  addEventListener("pagehide", rest);
  setInterval(() => {
    flush();
    if (document.hidden || Date.now() - heard < SILENT_FOR) return;
    failures = Math.max(failures, 1) + 1;
    tell();
    connect();
  }, 2000);

  connect();
})();
