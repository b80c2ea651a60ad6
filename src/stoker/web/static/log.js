// Shows, follows and searches a log. The server sends numbered lines as safe HTML; a message replaces all lines from its first
// number on, so no line appears twice after a reconnection. Away from the end, the shown part of the log grows while scrolling.
"use strict";

(() => {
  const MOST_LINES = 5000; // more make a phone slow: lines out of sight are removed, and come back when one scrolls
  const PART = 500; // lines loaded at once
  const CLOSE = 600; // pixels from what is not loaded: when to load it
  const MOST_HITS = 200; // found at once; more come when one goes on
  const TOGETHER = 200; // lines: errors that are closer belong together
  const SILENT_FOR = 40000; // milliseconds: the server sends a heartbeat every 15 s
  const AGAIN_AFTER = [500, 1000, 2000, 5000, 10000];
  const LOOK_FOR_ATTEMPTS = 3000;
  const UNSEEN_FOR = 10000; // hidden pages close their connection
  const NEAR = 40; // pixels from the bottom that count as the bottom

  function start(panel) {
    const part = (name) => panel.querySelector(`[data-log-${name}]`);
    const screen = part("screen");
    const picker = part("attempt");
    const nodes = part("node"); // only where a job has several
    const node = () => nodes?.value ?? "0";
    const note = part("note");
    const state = part("state");
    const follow = part("follow");
    const find = part("find");
    const hits = part("hits");
    const wrap = part("wrap");
    const download = part("download");
    const job = panel.dataset.log;

    let attempt = picker.value;
    let source = null;
    let mark = ""; // the last position, as sent by the server
    let heard = 0;
    let failures = 0;
    let again = 0;
    let unseen = 0;
    let over = false; // the attempt has ended and the log is complete
    let looking = 0;
    let sticks = true; // scrolled to the bottom, so new lines are followed
    let rows = []; // { number, element }, in their order
    let waiting = []; // messages that are not shown yet
    let drawing = false;
    let epoch = ""; // line numbers mean the same within one
    let apart = false; // a part of the log is shown that is not followed
    let total = 0; // lines of the log, as far as is known
    let loading = false;
    let found = null; // { query, lines, more, at }
    let marked = -1; // the line to show as found

    // Lines

    function later() {
      if (drawing) return;
      drawing = true;
      // Hidden pages get no animation frames.
      if (document.hidden) setTimeout(draw, 250);
      else requestAnimationFrame(draw);
    }

    function draw() {
      drawing = false;
      const messages = waiting;
      waiting = [];
      const fresh = document.createDocumentFragment();
      for (const message of messages) put(message, fresh);
      screen.append(fresh);
      trim();
      if (sticks) screen.scrollTop = screen.scrollHeight;
    }

    function put({ from, lines }, fresh) {
      const reused = new Map();
      while (rows.length && rows[rows.length - 1].number >= from) {
        const row = rows.pop();
        reused.set(row.number, row.element);
      }
      const added = lines.map((html, index) => {
        const number = from + index;
        const element = reused.get(number) ?? document.createElement("div");
        reused.delete(number);
        element.className = number === marked ? "log-line hit" : "log-line";
        if (element.innerHTML !== html) element.innerHTML = html; // escaped by the server
        return { number, element };
      });
      for (const element of reused.values()) element.remove();
      // Elements that are in place are not moved: that would undo a selection.
      for (const row of added) if (!row.element.parentNode) fresh.append(row.element);
      rows.push(...added);
    }

    function trim() {
      const extra = rows.length - MOST_LINES;
      if (extra <= 0) return;
      if (!sticks) return leave(); // somebody reads here: what is above must stay
      for (const { element } of rows.splice(0, extra)) element.remove();
    }

    function clear() {
      rows = [];
      waiting = [];
      screen.replaceChildren();
    }

    // Following

    function stick(wanted) {
      sticks = wanted && !apart;
      follow.hidden = sticks;
      follow.textContent = over ? "To the end" : "Follow";
    }

    screen.addEventListener("scroll", () => {
      const below = screen.scrollHeight - screen.scrollTop - screen.clientHeight;
      stick(below < NEAR);
      if (screen.scrollTop < CLOSE) earlier();
      if (apart && below < CLOSE) further();
    }, { passive: true });
    follow.addEventListener("click", () => {
      if (apart) choose(attempt);
      stick(true);
      screen.scrollTop = screen.scrollHeight;
      screen.focus({ preventScroll: true });
    });

    // Parts of the log

    // Stops following: new lines would push away the lines being read.
    function leave() {
      apart = true;
      waiting = [];
      close();
      stick(false);
      say("Not following");
    }

    async function ask(what, values) {
      const asked = new URLSearchParams(values);
      if (node() !== "0") asked.set("node", node());
      const response = await fetch(`${what}?${asked}`, { headers: { Accept: "application/json" } });
      if (!response.ok) throw new Error((await response.json().catch(() => null))?.detail ?? "The server does not answer");
      return response.json();
    }

    async function load(from, count) {
      const told = await ask(`/jobs/${job}/attempts/${attempt}/log/lines`, { from, count });
      total = told.total;
      return told;
    }

    async function once(work) {
      if (loading || !attempt) return;
      loading = true;
      try { await work(attempt); } catch (error) { say(error.message); } finally { loading = false; }
    }

    const earlier = () => once(async (mine) => {
      const first = rows[0]?.number ?? 0;
      if (first <= 0) return;
      const from = Math.max(0, first - PART);
      const told = await load(from, first - from);
      if (mine !== attempt || rows[0]?.number !== first) return;
      if (told.epoch !== epoch && epoch) return begin(told); // the oldest lines were removed: numbers have changed
      const above = screen.scrollHeight - screen.scrollTop;
      rows.unshift(...elements(told));
      screen.prepend(...rows.slice(0, told.lines.length).map(({ element }) => element));
      screen.scrollTop = screen.scrollHeight - above;
      if (rows.length > MOST_LINES && !sticks) {
        leave();
        for (const { element } of rows.splice(MOST_LINES)) element.remove();
      }
      noteStart();
    });

    const further = () => once(async (mine) => {
      const next = (rows.at(-1)?.number ?? -1) + 1;
      if (total && next >= total && over) return;
      const told = await load(next, PART);
      if (mine !== attempt || !apart || (rows.at(-1)?.number ?? -1) + 1 !== next || told.epoch !== epoch) return;
      const added = elements(told);
      rows.push(...added);
      screen.append(...added.map(({ element }) => element));
      const extra = rows.length - MOST_LINES;
      if (extra > 0) {
        const kept = rows[extra].element;
        const before = kept.offsetTop;
        for (const { element } of rows.splice(0, extra)) element.remove();
        screen.scrollTop -= before - kept.offsetTop;
      }
      noteStart();
    });

    function elements({ first, lines }) {
      return lines.map((html, index) => {
        const element = document.createElement("div");
        element.className = first + index === marked ? "log-line hit" : "log-line";
        element.innerHTML = html; // escaped by the server
        return { number: first + index, element };
      });
    }

    function begin(told) {
      leave();
      clear();
      epoch = told.epoch;
      rows = elements(told);
      screen.append(...rows.map(({ element }) => element));
      noteStart();
    }

    function noteStart() {
      const first = rows[0]?.number ?? 0;
      if (first) note.textContent = `Lines ${(first + 1).toLocaleString()} to ${(rows.at(-1).number + 1).toLocaleString()} of the log: scroll up for those before.`;
      note.hidden = !first;
    }

    // A line by its number, from 0; true when it is shown.
    async function go(number) {
      marked = number;
      for (const element of screen.querySelectorAll(".hit")) element.classList.remove("hit");
      let row = rows.find((one) => one.number === number);
      if (!row) {
        const told = await load(Math.max(0, number - PART / 2), PART);
        begin(told);
        row = rows.find((one) => one.number === number) ?? rows.at(-1);
      }
      if (!row) return;
      row.element.classList.add("hit");
      stick(false);
      screen.scrollTop = row.element.offsetTop - screen.clientHeight / 3;
      find.scrollIntoView({ block: "start" });
    }

    // Finding

    async function search(query) {
      hits.hidden = false;
      showHit("Searching…");
      const told = await ask(`/api/v1/jobs/${job}/attempts/${attempt}/log/matches`, { ...query, limit: MOST_HITS });
      const lines = told.matches.map(({ line }) => line);
      found = { query, lines, more: told.more, at: lines.length - 1, whole: told.whole };
      if (told.epoch !== epoch && told.whole && epoch) { clear(); epoch = told.epoch; apart = true; close(); }
      // For errors, the first of the last ones: the following are its consequences.
      if (!("text" in query)) while (found.at > 0 && lines[found.at] - lines[found.at - 1] <= TOGETHER) found.at -= 1;
      await showFound();
    }

    async function showFound() {
      const { lines, at, more, whole, query } = found;
      const only = whole ? "" : " in the end of the log, which is all that is here";
      part("previous").disabled = at <= 0 && !more;
      part("next").disabled = at >= lines.length - 1;
      if (!lines.length) return showHit(("text" in query ? "Nothing found" : "No errors found") + only);
      await go(lines[at] - 1);
      showHit(`${(at + 1).toLocaleString()} of ${lines.length.toLocaleString()}${more ? "+" : ""} · line ${lines[at].toLocaleString()}${only}`);
    }

    async function step(by) {
      if (!found) return;
      if (found.at + by < 0 && found.more) {
        const told = await ask(`/api/v1/jobs/${job}/attempts/${attempt}/log/matches`, { ...found.query, before: found.lines[0], limit: MOST_HITS });
        found.lines.unshift(...told.matches.map(({ line }) => line));
        found.more = told.more;
        found.at += told.matches.length;
      }
      found.at = Math.max(0, Math.min(found.lines.length - 1, found.at + by));
      await showFound();
    }

    function showHit(words) { part("hit").textContent = words; }

    const tried = (work) => work().catch((error) => { hits.hidden = false; showHit(error.message); });

    find.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = part("text").value;
      if (/^:\d{1,15}$/.test(text.trim())) return tried(() => go(Math.max(0, Number(text.trim().slice(1)) - 1)));
      if (!text.trim()) return forget();
      if (found?.query.text === text) return tried(() => step(-1));
      return tried(() => search({ text }));
    });
    part("text").addEventListener("input", () => { if (!part("text").value) forget(); });
    part("errors").addEventListener("click", () => { part("text").value = ""; tried(() => search({})); });
    part("previous").addEventListener("click", () => tried(() => step(-1)));
    part("next").addEventListener("click", () => tried(() => step(1)));

    function forget() {
      found = null;
      marked = -1;
      hits.hidden = true;
      for (const element of screen.querySelectorAll(".hit")) element.classList.remove("hit");
    }

    new ResizeObserver(() => { if (sticks) screen.scrollTop = screen.scrollHeight; }).observe(screen);

    function wrapped() {
      panel.classList.toggle("wraps", wrap.checked);
      if (sticks) screen.scrollTop = screen.scrollHeight;
    }

    try { wrap.checked = localStorage.getItem("log-wrap") !== "off"; } catch { /* private windows */ }
    wrap.addEventListener("change", () => {
      try { localStorage.setItem("log-wrap", wrap.checked ? "on" : "off"); } catch { /* private windows */ }
      wrapped();
    });
    wrapped();

    // Status

    function say(words) {
      if (state.textContent !== words) state.textContent = words;
    }

    function began({ from, whole }) {
      const host = picker.selectedOptions[0]?.dataset.host;
      if (!whole && node() !== "0") note.textContent = "The log of this node is on the file system of the cluster.";
      else if (!whole) note.textContent = `Only the end of the log is in the queue. The whole log is on ${host || "the machine that ran the job"}.`;
      else if (from) note.textContent = `This is the end of a long log. Scroll up for the ${from.toLocaleString()} lines before.`;
      note.hidden = whole && !from;
    }

    function ended({ outcome, reason, again: more }) {
      over = true;
      close();
      say(`Attempt ${attempt} has ended: ${outcome}${reason ? `, ${reason}` : ""}.`.replace(/\.+$/, "."));
      if (more) lookForAttempts();
    }

    // The connection

    function close() {
      clearTimeout(again);
      source?.close();
      source = null;
    }

    function open() {
      close();
      if (!attempt || over || apart || document.hidden) return; // in the background: `awake` opens it
      heard = Date.now();
      const asked = new URLSearchParams();
      if (mark) asked.set("after", mark);
      if (node() !== "0") asked.set("node", node());
      const mine = new SharedSource(`/jobs/${job}/attempts/${attempt}/log/live${asked.size ? `?${asked}` : ""}`);
      source = mine;
      const on = (name, work) => mine.addEventListener(name, (event) => {
        if (mine !== source || !("data" in event)) return;
        heard = Date.now();
        failures = 0;
        if (event.lastEventId) mark = event.lastEventId;
        if (mark) epoch = mark.slice(0, mark.lastIndexOf("."));
        work(JSON.parse(event.data));
      });
      const lines = (message) => { waiting.push(message); later(); };
      on("begin", (told) => { clear(); began(told); say("Following"); });
      on("lines", lines);
      on("beat", () => {});
      on("problem", (words) => say(words ? `The log cannot be read: ${words}` : "Following"));
      on("end", ended);
      mine.addEventListener("open", () => { heard = Date.now(); say("Following"); });
      mine.addEventListener("error", () => { if (mine === source) failed(); });
    }

    function failed() {
      close();
      failures += 1;
      if (failures > 1) say("Reconnecting…");
      again = setTimeout(open, AGAIN_AFTER[Math.min(failures, AGAIN_AFTER.length) - 1]);
    }

    // After sleep the connection may be dead without an error.
    function awake() {
      if (document.hidden || over || apart || !attempt) return;
      if (!source || source.readyState === EventSource.CLOSED || Date.now() - heard > SILENT_FOR) open();
    }
    document.addEventListener("visibilitychange", () => {
      clearTimeout(unseen);
      if (document.hidden) unseen = setTimeout(close, UNSEEN_FOR);
      else awake();
    });
    addEventListener("pageshow", awake);
    addEventListener("pagehide", close);
    addEventListener("online", () => { if (!over && !apart && attempt) open(); });
    setInterval(awake, 5000);

    // Attempts

    function choose(number) {
      attempt = String(number);
      picker.value = attempt;
      mark = epoch = "";
      over = apart = false;
      total = 0;
      for (const element of [find, screen.parentElement, wrap.closest("label")]) element.hidden = false;
      clearTimeout(looking);
      download.href = `/api/v1/jobs/${job}/attempts/${attempt}/log${node() === "0" ? "" : `?node=${node()}`}`;
      download.hidden = false;
      note.hidden = true;
      clear();
      stick(true);
      open();
    }
    picker.addEventListener("change", () => { forget(); choose(picker.value); });
    nodes?.addEventListener("change", () => { forget(); if (attempt) choose(attempt); });

    function lookForAttempts() {
      clearTimeout(looking);
      looking = setTimeout(async () => {
        if (document.hidden) return lookForAttempts();
        const found = await fetch(`/api/v1/jobs/${job}`, { headers: { Accept: "application/json" } })
          .then((response) => (response.ok ? response.json() : null))
          .catch(() => null);
        const before = picker.options.length;
        for (let number = before + 1; number <= (found?.attempts ?? 0); number += 1) picker.add(new Option(number, number));
        picker.closest("label").hidden = picker.options.length < 2;
        if (picker.options.length > before) choose(picker.options[picker.options.length - 1].value);
        else if (!found || ["queued", "held", "running"].includes(found.state)) lookForAttempts();
      }, LOOK_FOR_ATTEMPTS);
    }

    if (attempt) open();
    else lookForAttempts();
  }

  for (const panel of document.querySelectorAll("[data-log]")) start(panel);
})();
