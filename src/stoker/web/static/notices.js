// Notifications of this browser while a page is open: one per event for all windows. This file is also the
// service worker that shows them, because browsers on phones require one.
"use strict";

(() => {
  const WANTED = "stoker-notify";
  const SHOWN = "stoker-notified";
  const MOST_SHOWN = 100; // keys that are remembered
  const AGAIN_AFTER = 5000; // milliseconds

  if (typeof document === "undefined") serve();
  else show(document.currentScript.src);

  function serve() {
    self.addEventListener("install", () => self.skipWaiting());
    self.addEventListener("notificationclick", (event) => {
      event.notification.close();
      const target = new URL(event.notification.data?.path ?? "/", self.location.origin);
      event.waitUntil((async () => {
        const windows = await self.clients.matchAll({ type: "window", includeUncontrolled: true });
        const open = windows.find((one) => one.url === target.href);
        await (open ? open.focus() : self.clients.openWindow(target.href));
      })());
    });
  }

  function show(script) {
    const read = (key) => { try { return localStorage.getItem(key); } catch { return null; } }; // private windows
    const keep = (key, value) => { try { localStorage.setItem(key, value); } catch { /* private windows */ } };
    const wanted = () => Number(read(WANTED)) || 0; // since when, in milliseconds; 0: not
    let source = null;
    let again = 0;

    // Why this browser cannot show any; empty if it can.
    function obstacle() {
      if (!window.isSecureContext) return "This browser shows notifications only of pages with https (or on this machine itself): see --cert in the documentation.";
      if (!("Notification" in window) || !("serviceWorker" in navigator)) return "This browser cannot show notifications of a page. On an iPhone, put the page on the home screen first.";
      if (Notification.permission === "denied") return "This browser does not allow notifications of this page: allow them in its settings for the page, then reload.";
      return "";
    }

    async function notify({ key, title, body, path }) {
      const registration = await navigator.serviceWorker.register(script);
      await active(registration);
      await registration.showNotification(title, { body, tag: key, data: { path }, icon: "/favicon.ico" });
    }

    // A new service worker shows nothing before it is active.
    function active(registration) {
      if (registration.active) return null;
      const worker = registration.installing ?? registration.waiting;
      return new Promise((resolve) => worker.addEventListener("statechange", () => { if (worker.state === "activated") resolve(); }));
    }

    // All windows get each event; the first to take the lock shows it.
    function take(notice) {
      if (!wanted() || notice.at * 1000 < wanted() || obstacle()) return;
      navigator.locks.request(SHOWN, async () => {
        let shown = [];
        try { shown = JSON.parse(read(SHOWN)) ?? []; } catch { /* somebody else's text */ }
        if (shown.includes(notice.key)) return;
        keep(SHOWN, JSON.stringify([...shown, notice.key].slice(-MOST_SHOWN)));
        await notify(notice);
      });
    }

    // Also in the background, where other streams of a page close.
    function connect() {
      clearTimeout(again);
      source?.close();
      source = null;
      if (!wanted() || obstacle()) return;
      source = new SharedSource("/live/notices");
      source.addEventListener("notice", (event) => take(JSON.parse(event.data)));
      source.addEventListener("error", () => { again = setTimeout(connect, AGAIN_AFTER); });
    }

    // On the settings

    function tell() {
      const button = document.querySelector("[data-notify-browser]");
      if (!button) return;
      const why = obstacle();
      const on = !why && wanted() && Notification.permission === "granted";
      button.hidden = Boolean(why);
      button.textContent = on ? "Do not notify me in this browser" : "Notify me in this browser";
      button.classList.toggle("primary", !on);
      document.querySelector("[data-notify-try]").hidden = !on;
      document.querySelector("[data-notify-state]").textContent = why || (on ? "On: keep a page open, in the background is enough." : "Off.");
    }

    document.addEventListener("click", async (event) => {
      if (event.target.closest("[data-notify-try]")) return notify({ key: "try", title: "Stoker: a test", body: "Notifications of this browser look like this.", path: "/settings" });
      if (!event.target.closest("[data-notify-browser]")) return;
      const on = wanted() && Notification.permission === "granted";
      // Earlier events are not shown; the queue's clock may differ from this one.
      if (on) keep(WANTED, "0");
      else if ((await Notification.requestPermission()) === "granted") keep(WANTED, String(Stoker.now()));
      connect();
      tell();
    });
    document.addEventListener("stoker:settings", tell);
    // Switched in another window.
    addEventListener("storage", (event) => { if (event.key === WANTED) { connect(); tell(); } });
    addEventListener("pageshow", (event) => { if (event.persisted) connect(); });
    addEventListener("pagehide", () => { source?.close(); });
    connect();
    tell();
  }
})();
