// Shows and follows a log. The server sends numbered lines as safe HTML; a message replaces all lines from its first number
// on, so no line appears twice after a reconnection.
"use strict";

(() => {
  const MOST_LINES = 5000; // more make a phone slow; the download has the rest
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
        element.className = "log-line";
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
      const kept = rows[extra].element;
      const before = kept.offsetTop;
      for (const { element } of rows.splice(0, extra)) element.remove();
      note.textContent = `Only the last ${MOST_LINES.toLocaleString()} lines are shown; the download has all.`;
      note.hidden = false;
      // Keep the same lines in view.
      if (!sticks) screen.scrollTop -= before - kept.offsetTop;
    }

    function clear() {
      rows = [];
      waiting = [];
      screen.replaceChildren();
    }

    // Following

    function stick(wanted) {
      sticks = wanted;
      follow.hidden = wanted;
    }

    screen.addEventListener("scroll", () => {
      stick(screen.scrollHeight - screen.scrollTop - screen.clientHeight < NEAR);
    }, { passive: true });
    follow.addEventListener("click", () => {
      stick(true);
      screen.scrollTop = screen.scrollHeight;
      screen.focus({ preventScroll: true });
    });
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
      else if (from) note.textContent = `This is the end of a long log. The download also has the ${from.toLocaleString()} lines before.`;
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
      if (!attempt || over || document.hidden) return; // in the background: `awake` opens it
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
      if (document.hidden || over || !attempt) return;
      if (!source || source.readyState === EventSource.CLOSED || Date.now() - heard > SILENT_FOR) open();
    }
    document.addEventListener("visibilitychange", () => {
      clearTimeout(unseen);
      if (document.hidden) unseen = setTimeout(close, UNSEEN_FOR);
      else awake();
    });
    addEventListener("pageshow", awake);
    addEventListener("pagehide", close);
    addEventListener("online", () => { if (!over && attempt) open(); });
    setInterval(awake, 5000);

    // Attempts

    function choose(number) {
      attempt = String(number);
      picker.value = attempt;
      mark = "";
      over = false;
      clearTimeout(looking);
      download.href = `/api/v1/jobs/${job}/attempts/${attempt}/log${node() === "0" ? "" : `?node=${node()}`}`;
      download.hidden = false;
      note.hidden = true;
      clear();
      stick(true);
      open();
    }
    picker.addEventListener("change", () => choose(picker.value));
    nodes?.addEventListener("change", () => { if (attempt) choose(attempt); });

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
