// One connection for all live pages, because browsers open at most six to one server. A shared worker holds it, or the page
// itself in browsers without shared workers. This file is both the worker and the replacement of EventSource in pages.
"use strict";

(() => {
  const TOGETHER = 30; // milliseconds: subscriptions within this time are opened together
  const TIDY_AFTER = 3000; // milliseconds until streams that nobody needs are closed
  const MOST = 32; // the server's limit for one connection
  const HERE_EVERY = 20000;
  const GONE_AFTER = 180000; // for pages that crashed; pages in the background may report late
  const START_WITHIN = 10000;

  class Hub {
    #topics = new Map(); // key -> { where, mark, tell }
    #sources = [];
    #timer = 0;
    #due = Infinity;

    add(key, where, tell) {
      this.#topics.set(key, { where, mark: "", tell });
      this.#open(TOGETHER);
    }

    remove(key) {
      if (this.#topics.delete(key)) this.#open(this.#topics.size ? TIDY_AFTER : 0);
    }

    #open(wait) {
      if (Date.now() + wait >= this.#due) return;
      clearTimeout(this.#timer);
      this.#due = Date.now() + wait;
      this.#timer = setTimeout(() => { this.#due = Infinity; this.#reopen(); }, wait);
    }

    #reopen() {
      for (const source of this.#sources) source.close();
      const all = [...this.#topics];
      this.#sources = [];
      for (let first = 0; first < all.length; first += MOST) this.#sources.push(this.#source(all.slice(first, first + MOST)));
    }

    #source(parts) {
      const source = new EventSource(`/live/many?${parts.map(([, topic]) => `on=${encodeURIComponent(address(topic))}`).join("&")}`);
      const wanted = ([key, topic]) => this.#topics.get(key) === topic;
      const over = ([key, topic]) => {
        this.#topics.delete(key);
        topic.tell({ kind: "error" });
      };
      source.onopen = () => { for (const part of parts.filter(wanted)) part[1].tell({ kind: "open" }); };
      source.onmessage = (event) => {
        const [number, name, data, mark] = JSON.parse(event.data);
        const part = parts[number];
        if (!wanted(part)) return;
        if (!name) return over(part);
        if (mark) part[1].mark = mark;
        part[1].tell({ kind: "event", name, data, mark });
      };
      // Pages decide when to reconnect, and from which position.
      source.onerror = () => {
        source.close();
        for (const part of parts.filter(wanted)) over(part);
      };
      return source;
    }
  }

  // A stream continues in a new connection at its last position.
  function address({ where, mark }) {
    const url = new URL(where, location.origin);
    if (mark) url.searchParams.set("after", mark);
    return url.pathname + url.search;
  }

  if (typeof document === "undefined") work();
  else serve(document.currentScript.src);

  function work() {
    const hub = new Hub();
    const pages = new Set();
    let count = 0;

    self.onconnect = ({ ports: [port] }) => {
      const page = { number: (count += 1), heard: Date.now(), topics: new Set() };
      port.onmessage = ({ data: { what, id, where } }) => {
        page.heard = Date.now();
        pages.add(page);
        const key = `${page.number}.${id}`;
        if (what === "listen") {
          page.topics.add(key);
          hub.add(key, where, (told) => port.postMessage({ id, ...told }));
        } else if (what === "close") {
          page.topics.delete(key);
          hub.remove(key);
        }
      };
      port.postMessage({ kind: typeof EventSource === "undefined" ? "alone" : "hello" });
    };
    setInterval(() => {
      for (const page of pages) {
        if (Date.now() - page.heard < GONE_AFTER) continue;
        pages.delete(page);
        for (const key of page.topics) hub.remove(key);
        page.topics.clear();
      }
    }, HERE_EVERY);
  }

  function serve(script) {
    const open = new Map(); // id -> SharedSource
    let count = 0;
    let port = null;
    let hub = null;

    function ask(what, id = 0, where = "") {
      if (port) port.postMessage({ what, id, where });
      else if (what === "listen") hub.add(id, where, (told) => take({ id, ...told }));
      else if (what === "close") hub.remove(id);
    }

    function take({ id, kind, name, data, mark }) {
      const source = open.get(id);
      if (!source) return;
      if (kind === "event") source.dispatchEvent(new MessageEvent(name, { data, lastEventId: mark }));
      else {
        source.readyState = kind === "open" ? EventSource.OPEN : EventSource.CLOSED;
        if (kind === "error") open.delete(id);
        source.dispatchEvent(new Event(kind));
      }
    }

    function alone() {
      if (hub) return;
      port = null;
      hub = new Hub();
      for (const [id, source] of open) ask("listen", id, source.where);
    }

    try {
      const worker = new SharedWorker(script, { name: "stoker" });
      const late = setTimeout(alone, START_WITHIN);
      worker.onerror = alone;
      port = worker.port;
      port.onmessage = ({ data }) => {
        if (data.kind === "hello") clearTimeout(late);
        else if (data.kind === "alone") alone();
        else if (!hub) take(data);
      };
      setInterval(() => { if (open.size) ask("here"); }, HERE_EVERY);
    } catch { // a browser without shared workers
      alone();
    }

    // The part of EventSource that pages need. After an error it is closed and must be reopened.
    window.SharedSource = class extends EventTarget {
      static open = open;

      constructor(where) {
        super();
        this.where = where;
        this.readyState = EventSource.CONNECTING;
        this.id = (count += 1);
        open.set(this.id, this);
        ask("listen", this.id, where);
      }

      close() {
        this.readyState = EventSource.CLOSED;
        if (open.delete(this.id)) ask("close", this.id);
      }
    };
  }
})();
